"""Who a node is: an ed25519 key, and nothing else.

A node's identity is its public key, never its network address, so two nodes behind one address stay two nodes and a
moved node stays itself. Signatures cover a domain word, so that one made for a submission says nothing elsewhere.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import OrderedDict
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

HEX_64 = re.compile("[0-9a-f]{64}")


class Identity:
    """A key pair. `public_key` is 64 hex digits; `address` the 20-byte id that the problem choice is seeded with."""

    def __init__(self, private_key: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self.public_key = self._key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> Identity:
        """A fresh key from the system's randomness."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def from_seed(cls, run_seed: int, name: str) -> Identity:
        """The key of node `name` in run `run_seed`: for reproducible runs, not for secrets."""
        return cls(hashlib.sha256(f"armillary identity|{run_seed}|{name}".encode()).digest())

    @property
    def address(self) -> str:
        return address_of(self.public_key)

    def sign(self, content: bytes, *, domain: str = "") -> bytes:
        """64-byte signature over `content` in `domain`."""
        covered = _covered(content, domain)
        signature = self._key.sign(covered)
        _made_here[signature] = (self.public_key, hashlib.sha256(covered).digest())
        if len(_made_here) > MADE_HERE_MAX:
            _made_here.popitem(last=False)
        return signature


MADE_HERE_MAX = 1 << 14
_made_here: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()
"""The latest signatures that this process made: over what, and by whom. In a simulation all nodes are one process, and
what it has just signed it need not check by arithmetic."""


def verify(public_key: str, content: bytes, signature: bytes, *, domain: str = "") -> bool:
    """True when `signature` is `public_key`'s over `content` in `domain`. Never raises: a malformed key or signature
    from a peer is simply not a valid one."""
    if not is_public_key(public_key):
        return False
    covered = _covered(content, domain)
    try:
        made = _made_here.get(signature)
        if made is not None and made == (public_key, hashlib.sha256(covered).digest()):
            return True
        _key_of(public_key).verify(signature, covered)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


@lru_cache(maxsize=256)
def _key_of(public_key: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))


def is_public_key(text: str) -> bool:
    """Whether `text` is written as a public key is: 64 lower-case hex digits, so that one key has one spelling."""
    return HEX_64.fullmatch(text) is not None


def address_of(public_key: str) -> str:
    """The 20-byte address of a key, as 40 hex digits: the tail of its SHA-256, as short ids usually are made."""
    return hashlib.sha256(bytes.fromhex(public_key)).digest()[-20:].hex()


def _covered(content: bytes, domain: str) -> bytes:
    raw = domain.encode()
    return struct.pack("<I", len(raw)) + raw + content
