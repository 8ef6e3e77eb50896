"""Signed documents in canonical JSON: written one way only, read as hostile input.

A document is one JSON object with sorted keys, no spaces, ASCII only, whole numbers only. Reading refuses whatever
writing would not have produced, byte for byte: so there is one encoding per document, and a signature covers it.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

Fields = dict[str, Any]

SIGNATURE_BYTES = 64  # ed25519
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_HEX_64 = re.compile(r"[0-9a-f]{64}")
_HEX_128 = re.compile(r"[0-9a-f]{128}")


class ManifestError(ValueError):
    """A document that is not what it should be. Takes the sentence that says why."""


class DeltaError(ValueError):
    """Bytes that are no increment, or not one of this base. Takes the sentence that says why."""


def check_name(name: object, what: str) -> str:
    """A label of one path component: letters, digits, `_`, `.`, `-`, not led by `.` or `-`, at most 128 characters."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ManifestError(
            f"{what} is {name!r:.140}, expected 1 to 128 letters, digits, '_', '.', '-', the first not '.' or '-'"
        )
    return name


def canonical(kind: str, fields: Fields, signature: bytes | None = None) -> bytes:
    """The one encoding of a document. Without `signature`: the bytes that are signed or hashed; the kind is part of
    them, so that a signature made for one kind says nothing in another."""
    document = {"document": f"shardcast/{kind}/1", **fields}
    if signature is not None:
        document["signature"] = signature.hex()
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def parse_document(raw: bytes, kind: str, bytes_max: int, keys: frozenset[str]) -> tuple[Fields, bytes]:
    """The fields (keys checked, values not) and the signature (not verified). Raises ManifestError."""
    if len(raw) > bytes_max:
        raise ManifestError(f"{kind} of {len(raw)} bytes, at most {bytes_max} were expected")
    try:
        document = json.loads(
            bytes(raw), object_pairs_hook=_no_repeats, parse_float=_no_fractions, parse_constant=_no_fractions
        )
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{kind} is not JSON: {str(error)[:120]}") from None
    if not isinstance(document, dict):
        raise ManifestError(f"{kind} is a JSON {type(document).__name__}, an object was expected")
    if document.keys() != keys | {"document", "signature"}:
        odd = sorted(document.keys() ^ (keys | {"document", "signature"}))
        raise ManifestError(f"{kind} has missing or unknown fields: {', '.join(odd)[:140]}")
    if document.pop("document") != f"shardcast/{kind}/1":
        raise ManifestError(f"this is no shardcast/{kind}/1 document")
    signature = document.pop("signature")
    if not isinstance(signature, str) or not _HEX_128.fullmatch(signature):
        raise ManifestError(f"the signature of a {kind} is {2 * SIGNATURE_BYTES} lower-case hex digits")
    if canonical(kind, document, bytes.fromhex(signature)) != raw:
        raise ManifestError(f"{kind} is not in canonical form")
    return document, bytes.fromhex(signature)


def natural(fields: Fields, key: str, maximum: int) -> int:
    """A whole number from 0 to `maximum` (`True` is none)."""
    value = fields[key]
    if type(value) is not int or not 0 <= value <= maximum:
        raise ManifestError(f"{key} is {value!r:.40}, a whole number from 0 to {maximum} was expected")
    return value


def hex_digest(fields: Fields, key: str) -> str:
    """A 32-byte value as 64 lower-case hex digits."""
    return check_hex(fields[key], key)


def check_hex(value: object, what: str) -> str:
    if not isinstance(value, str) or not _HEX_64.fullmatch(value):
        raise ManifestError(f"{what} is {value!r:.80}, 64 lower-case hex digits were expected")
    return value


def check_list(value: object, what: str, length_max: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > length_max:
        raise ManifestError(f"{what} is no list of at most {length_max} items")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> Fields:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ManifestError("a field is named twice")
    return fields


def _no_fractions(literal: str) -> NoReturn:
    raise ManifestError(f"{literal[:40]!r} is no whole number")
