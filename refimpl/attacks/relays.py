"""What a dishonest relay may do to a shard on its way out: one function, and one line in `SPOILS`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

from refimpl.messages import Blob


def flipped_bit(index: int, blob: Blob) -> Blob:
    """Changes one bit of every shard."""
    if blob.data is None:
        return dataclasses.replace(blob, content_id=hashlib.sha256(blob.content_id.encode()).hexdigest())
    raw = bytearray(blob.data)
    raw[len(raw) // 2] ^= 1
    return Blob(len(raw), blob.content_id, bytes(raw))


def truncated(index: int, blob: Blob) -> Blob:
    """Leaves out the last byte."""
    data = None if blob.data is None else bytes(blob.data[:-1])
    return Blob(blob.size_bytes - 1, blob.content_id, data)


SPOILS: dict[str, Callable[[int, Blob], Blob]] = {"flipped-bit": flipped_bit, "truncated": truncated}
