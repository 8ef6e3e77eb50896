"""The plain codings of an increment's chunk, exact for any content, and the bounds on what they unpack to.

**raw**: the bytes, compressed. **planes**: for elements of 1, 2, 4 or 8 bytes, zigzag(new − old) split into byte
planes, each compressed by itself; the high planes are zeros when the steps are small. `delta_sparse.py` has the third
coding, for 16-bit weights of which few change. Compression is zstd, as pyarrow brings it.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa

from refimpl.shardcast.document import DeltaError

CHUNK_BYTES_MAX = 1 << 24
ZSTD_LEVEL = 1

SAME, RAW, SPARSE, PLANES = 0, 1, 2, 3  # codings of a chunk
CODING_NAMES = ("same", "raw", "sparse", "planes")

_LENGTHS = struct.Struct("<II")  # of one stream: raw, coded (equal: stored as it is)


# ----------------------------------------------------------------------------------------------------- zstd, bounded
def _squeeze(stream: np.ndarray) -> bytes:
    """Lengths and the stream, compressed when that helps."""
    raw = np.ascontiguousarray(stream)
    coded: bytes = pa.Codec("zstd", compression_level=ZSTD_LEVEL).compress(raw, asbytes=True) if raw.size else b""
    if len(coded) >= raw.size:
        coded = raw.tobytes()
    return _LENGTHS.pack(raw.size, len(coded)) + coded


def _unsqueeze(payload: memoryview, raw_max: int) -> tuple[np.ndarray, memoryview]:
    """One stream and what follows it. `raw_max` bounds what is allocated, whatever the payload claims."""
    if len(payload) < _LENGTHS.size:
        raise DeltaError("an increment's chunk breaks off in a stream's lengths")
    raw_length, coded_length = _LENGTHS.unpack_from(payload)
    if raw_length > raw_max or coded_length > raw_length:
        raise DeltaError(f"a stream claims {raw_length} bytes from {coded_length}, at most {raw_max} were expected")
    coded, rest = payload[_LENGTHS.size : _LENGTHS.size + coded_length], payload[_LENGTHS.size + coded_length :]
    if len(coded) != coded_length:
        raise DeltaError("an increment's chunk breaks off in a stream")
    if raw_length == coded_length:
        return np.frombuffer(coded, np.uint8), rest
    try:
        raw = pa.decompress(pa.py_buffer(coded), decompressed_size=raw_length, codec="zstd")
    except (OSError, ValueError) as error:  # larger or smaller than claimed, or no zstd at all
        raise DeltaError(f"a stream does not decompress: {error}") from None
    if len(raw) != raw_length:
        raise DeltaError(f"a stream decompresses to {len(raw)} bytes, {raw_length} were claimed")
    return np.frombuffer(raw, np.uint8), rest


# ------------------------------------------------------------------------------------------------------------ codings
def encode_planes(old: np.ndarray, new: np.ndarray) -> bytes:
    """Unsigned [n] of any width -> payload."""
    width = old.dtype.itemsize
    signed = np.dtype(f"i{width}")
    difference = (new - old).view(signed)  # wraps
    zigzag = ((difference << 1) ^ (difference >> (8 * width - 1))).view(old.dtype)
    planes = zigzag.view(np.uint8).reshape(-1, width)
    return b"".join(_squeeze(planes[:, plane]) for plane in range(width))


def decode_planes(old: np.ndarray, payload: memoryview) -> np.ndarray:
    """Unsigned [n] of any width, payload -> the same. Raises DeltaError."""
    width = old.dtype.itemsize
    planes, rest = np.empty((old.size, width), np.uint8), payload
    for plane in range(width):
        stream, rest = _unsqueeze(rest, old.size)
        if stream.size != old.size:
            raise DeltaError(f"a byte plane has {stream.size} bytes, {old.size} were expected")
        planes[:, plane] = stream
    if len(rest):
        raise DeltaError(f"{len(rest)} bytes are left over in an increment's chunk")
    zigzag = planes.reshape(-1).view(old.dtype)
    one = old.dtype.type(1)
    difference = (zigzag >> one) ^ (~(zigzag & one) + one)  # (z >> 1) ^ −(z & 1)
    return old + difference


def encode_raw(new: np.ndarray) -> bytes:
    return _squeeze(new.view(np.uint8))


def decode_raw(size_bytes: int, payload: memoryview) -> np.ndarray:
    stream, rest = _unsqueeze(payload, size_bytes)
    if stream.size != size_bytes or len(rest):
        raise DeltaError(f"a chunk of {size_bytes} bytes came as {stream.size} and {len(rest)} left over")
    return stream
