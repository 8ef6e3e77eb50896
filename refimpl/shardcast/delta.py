"""The lossless increment between two versions of a checkpoint: small enough to send instead of the weights.

    bytes of an increment = header, then one record per chunk of the target, in the order of the target's stream

Each record says how its chunk comes out of a chunk of the base (`delta_codec.py` has the codings) and stands alone: a
receiver turns them into the target's bytes one after another, with the memory of one chunk, while later ones are still
on the way. What comes out is checked against the target's signed manifest, shard by shard, like bytes from any relay;
so the increment itself needs no trust, only bounds.

Tensors are matched by file, name, type and size, wherever they lie. What has no partner, or is no tensor, travels whole
(compressed). Neighbouring tensors of one type share chunks, so that hundreds of small ones cost nothing.

Differs from the original: it always sends full checkpoints; "incremental weights" are promised in print only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from refimpl.shardcast.delta_codec import (
    CHUNK_BYTES_MAX,
    CODING_NAMES,
    PLANES,
    RAW,
    SAME,
    SPARSE,
    DeltaError,
    decode_planes,
    decode_raw,
    encode_planes,
    encode_raw,
)
from refimpl.shardcast.delta_sparse import decode_sparse, encode_sparse, exponent_classes
from refimpl.shardcast.tensors import OPAQUE, WIDTHS, Read, Span
from refimpl.shardcast.workers import in_order

CHUNK_BYTES = 2 << 20
MAGIC = b"SHRDDLT1"
KIND_CODES = tuple(WIDTHS)  # code of a kind = its place
_HEADER = struct.Struct("<8sQQ")  # magic, size of base, size of target
_RECORD = struct.Struct("<BBHIQI")  # coding, kind, zero, size, offset in the base, length of the payload
_PAYLOAD_SLACK = 64  # a payload is never longer than its chunk and this: the encoder would have sent it raw
_CLASSES = {kind: exponent_classes(kind) for kind, width in WIDTHS.items() if width == 2}
_TYPES = {kind: np.dtype(f"<u{width}") for kind, width in WIDTHS.items()}


class Chunk(NamedTuple):
    """A piece of the target's stream and where its like lies in the base's (None: nowhere)."""

    offset: int
    size: int
    kind: str
    base_offset: int | None


def plan_chunks(
    base: Iterable[Span], target: Iterable[Span], chunk_bytes: int = CHUNK_BYTES, shard_bytes: int = 1 << 62
) -> list[Chunk]:
    """Cut the target into chunks of at most `chunk_bytes`, each beside its like in the base. None reaches over the end
    of a shard, so that every shard of the target can be made by itself."""
    if not 8 <= chunk_bytes <= CHUNK_BYTES_MAX or chunk_bytes % 8:
        raise ValueError(f"chunk size is {chunk_bytes} bytes, a multiple of 8 up to {CHUNK_BYTES_MAX} was expected")
    where = {span.key: span.offset for span in base}
    runs: list[Chunk] = []
    for span in target:
        run = Chunk(span.offset, span.size, span.kind, where.get(span.key))
        last = runs[-1] if runs else None
        joins = (
            last is not None
            and last.kind == run.kind
            and (last.base_offset is None) == (run.base_offset is None)
            and (last.base_offset or 0) + last.size == (run.base_offset if run.base_offset is not None else last.size)
        )
        if last is not None and joins:
            runs[-1] = last._replace(size=last.size + run.size)
        else:
            runs.append(run)
    return [chunk for run in runs for chunk in _cut(run, chunk_bytes, shard_bytes)]


def _cut(run: Chunk, chunk_bytes: int, shard_bytes: int) -> Iterator[Chunk]:
    """Elements that the end of a shard cuts in two travel as single bytes on either side of it."""
    width, at, end = WIDTHS[run.kind], run.offset, run.offset + run.size
    while at < end:
        stop = min(end, at + chunk_bytes, (at // shard_bytes + 1) * shard_bytes)
        in_element = (at - run.offset) % width
        if in_element:
            stop, kind = min(stop, at + width - in_element), OPAQUE
        elif stop - at >= width:
            stop, kind = stop - (stop - at) % width, run.kind
        else:
            kind = OPAQUE
        yield Chunk(at, stop - at, kind, None if run.base_offset is None else run.base_offset + at - run.offset)
        at = stop


def encode_chunk(old: np.ndarray | None, new: np.ndarray, kind: str) -> tuple[int, bytes]:
    """(coding, payload): the smallest of what may pay. Arrays are unsigned, of the kind's width."""
    if old is None:
        return RAW, encode_raw(new)
    if np.array_equal(old, new):
        return SAME, b""
    tried: list[tuple[int, bytes]] = []
    if kind in _CLASSES:
        sparse = encode_sparse(old, new, _CLASSES[kind])
        tried += [(SPARSE, sparse)] if sparse is not None else []
    if not tried or len(tried[0][1]) > new.nbytes // 4:  # much has changed
        tried += [(PLANES, encode_planes(old, new)), (RAW, encode_raw(new))]
    return min(tried, key=lambda one: len(one[1]))


def encode_header(base_bytes: int, target_bytes: int) -> bytes:
    return _HEADER.pack(MAGIC, base_bytes, target_bytes)


def encode_record(read_base: Read, read_target: Read, chunk: Chunk) -> bytes:
    """One chunk, ready to be sent."""
    new = _elements(read_target(chunk.offset, chunk.size), chunk.kind)
    old = None if chunk.base_offset is None else _elements(read_base(chunk.base_offset, chunk.size), chunk.kind)
    coding, payload = encode_chunk(old, new, chunk.kind)
    record = _RECORD.pack(coding, KIND_CODES.index(chunk.kind), 0, chunk.size, chunk.base_offset or 0, len(payload))
    return record + payload


def encode_increment(
    read_base: Read, base_bytes: int, read_target: Read, target_bytes: int, chunks: Iterable[Chunk], workers: int = 1
) -> Iterator[bytes]:
    """The increment, piece by piece, its chunks compared on so many cores. `target_bytes`: of the chunks together."""
    yield encode_header(base_bytes, target_bytes)
    yield from in_order(partial(encode_record, read_base, read_target), chunks, workers)


class IncrementDecoder:
    """Takes an increment in pieces of any size and gives the target's stream, in order.

    Bounds: memory stays within a few chunks whatever the bytes claim; every claim is checked before it is acted on.
    """

    def __init__(self, read_base: Read, base_bytes: int, target_bytes: int) -> None:
        self._read_base, self._base_bytes, self._target_bytes = read_base, base_bytes, target_bytes
        self._buffer = bytearray()
        self._begun = False
        self.done_bytes = 0  # of the target, so far
        self.codings: dict[str, int] = dict.fromkeys(CODING_NAMES, 0)  # bytes of the target, by coding

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """The next pieces of the target (iterate to the end before feeding more). Raises DeltaError."""
        self._buffer += data
        at = 0
        if not self._begun and len(self._buffer) >= _HEADER.size:
            self._read_header()
            at = _HEADER.size
        while self._begun and len(self._buffer) - at >= _RECORD.size:
            coding, kind, size, base_offset, length = self._read_record(at)
            if len(self._buffer) - at < _RECORD.size + length:
                break
            payload = bytes(self._buffer[at + _RECORD.size : at + _RECORD.size + length])
            at += _RECORD.size + length
            self.done_bytes += size
            self.codings[CODING_NAMES[coding]] += size
            yield self._decode(coding, kind, size, base_offset, memoryview(payload))
        del self._buffer[:at]

    def finish(self) -> None:
        """No more pieces come. Raises DeltaError unless the target is complete."""
        if self._buffer or self.done_bytes != self._target_bytes or not self._begun:
            raise DeltaError(
                f"the increment ended after {self.done_bytes} of {self._target_bytes} bytes, "
                f"with {len(self._buffer)} bytes unread"
            )

    def _read_header(self) -> None:
        magic, base_bytes, target_bytes = _HEADER.unpack_from(self._buffer)
        if magic != MAGIC:
            raise DeltaError(f"an increment begins with {MAGIC!r}, not {bytes(magic)!r}")
        if (base_bytes, target_bytes) != (self._base_bytes, self._target_bytes):
            raise DeltaError(
                f"an increment from {base_bytes} to {target_bytes} bytes, expected one from {self._base_bytes} to "
                f"{self._target_bytes}"
            )
        self._begun = True

    def _read_record(self, at: int) -> tuple[int, str, int, int, int]:
        coding, kind_code, zero, size, base_offset, length = _RECORD.unpack_from(self._buffer, at)
        if coding >= len(CODING_NAMES) or kind_code >= len(KIND_CODES) or zero:
            raise DeltaError(f"an increment's chunk has coding {coding}, kind {kind_code}: unknown")
        kind = KIND_CODES[kind_code]
        if not 0 < size <= CHUNK_BYTES_MAX or size % WIDTHS[kind]:
            raise DeltaError(f"an increment's chunk has {size} bytes of kind {kind}, 1 to {CHUNK_BYTES_MAX} can be")
        if self.done_bytes + size > self._target_bytes:
            raise DeltaError(f"an increment goes beyond the {self._target_bytes} bytes of its target")
        if coding != RAW and base_offset + size > self._base_bytes:
            raise DeltaError(f"an increment asks for bytes beyond the {self._base_bytes} of its base")
        if length > size + _PAYLOAD_SLACK:
            raise DeltaError(f"a chunk of {size} bytes has a payload of {length}")
        if (coding == SPARSE and kind not in _CLASSES) or (coding == SAME and length > 0):
            raise DeltaError(f"coding {CODING_NAMES[coding]} does not go with kind {kind} and {length} bytes")
        return coding, kind, size, base_offset, length

    def _decode(self, coding: int, kind: str, size: int, base_offset: int, payload: memoryview) -> memoryview:
        if coding == RAW:
            return _bytes(decode_raw(size, payload))
        base = self._read_base(base_offset, size)
        if len(base) != size:
            raise DeltaError(f"the base gave {len(base)} bytes at {base_offset}, {size} were asked for")
        if coding == SAME:
            return memoryview(base).cast("B")
        old = _elements(base, kind)
        new = decode_sparse(old, payload, _CLASSES[kind]) if coding == SPARSE else decode_planes(old, payload)
        return _bytes(new)


def _elements(data: bytes | bytearray | memoryview, kind: str) -> np.ndarray:
    """Read-only, aligned unsigned elements: one array type for the compiled loops."""
    elements = np.require(np.frombuffer(data, _TYPES[kind]), requirements="A")
    elements.flags.writeable = False
    return elements


def _bytes(elements: np.ndarray) -> memoryview:
    return elements.view(np.uint8).data


__all__ = ["OPAQUE", "Chunk", "DeltaError", "IncrementDecoder", "encode_chunk", "encode_increment", "plan_chunks"]
