"""Where the tensors of a checkpoint lie in its byte stream, so that an increment can compare like with like.

Only safetensors files are looked into (8 bytes of header length, a JSON header, the data). Anything else, and any
header that is not entirely regular, is one opaque span: the increment is then less small, never wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from refimpl.shardcast.layout import Layout

Read = Callable[[int, int], "bytes | bytearray | memoryview"]
"""`read(offset, size)`: exactly these bytes of a version's stream."""

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
OPAQUE = "U8"
# how the elements are compared: two float formats of 16 bits, else by width
KINDS = {
    "BF16": "BF16",
    "F16": "F16",
    **dict.fromkeys(("I16", "U16"), "U16"),
    **dict.fromkeys(("F32", "I32", "U32"), "U32"),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), "U64"),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), "U8"),
}
WIDTHS = {"U8": 1, "BF16": 2, "F16": 2, "U16": 2, "U32": 4, "U64": 8}


class Span(NamedTuple):
    """Bytes of the stream that belong together. Spans of two versions with equal `key` are compared."""

    offset: int
    size: int
    kind: str  # a key of WIDTHS
    key: tuple[str, ...]


def spans(layout: Layout, read: Read) -> list[Span]:
    """The whole stream, in order, without gaps."""
    found, start = [], 0
    for name, size in zip(layout.names, layout.sizes_bytes, strict=True):
        if size:
            tensors = _safetensors(name, start, size, read) if name.endswith(".safetensors") else None
            found += tensors or [Span(start, size, OPAQUE, (name, str(size)))]
        start += size
    return found


def _safetensors(file: str, start: int, size: int, read: Read) -> list[Span] | None:
    """None when the file is not as the format says, to the last byte."""
    if size < 8:
        return None
    length = int.from_bytes(read(start, 8), "little")
    if length > min(HEADER_BYTES_MAX, size - 8):
        return None
    try:
        header = json.loads(bytes(read(start + 8, length)))
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    data, found = start + 8 + length, [Span(start, 8 + length, OPAQUE, (file, "header", str(length)))]
    at = 0
    tensors = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    try:
        for name, entry in sorted(tensors, key=lambda item: item[1]["data_offsets"][0]):
            begin, end, dtype = _entry(entry)
            kind = KINDS.get(dtype, OPAQUE)
            if begin != at or end < begin or end > size - 8 - length or (end - begin) % WIDTHS[kind]:
                return None
            if end > begin:
                found.append(Span(data + begin, end - begin, kind, (file, name, dtype, str(end - begin))))
            at = end
    except (TypeError, KeyError, IndexError, ValueError):
        return None
    return found if data + at == start + size else None


def _entry(entry: Any) -> tuple[int, int, str]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not isinstance(entry["dtype"], str):
        raise TypeError
    return begin, end, entry["dtype"]
