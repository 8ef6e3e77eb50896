"""Increments: bit-exact for any content, small for small steps, harmless for hostile bytes."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.identity import Identity
from refimpl.shardcast import delta
from refimpl.shardcast.assembly import Assembly
from refimpl.shardcast.delta import Chunk, DeltaError, IncrementDecoder, encode_chunk, encode_increment, plan_chunks
from refimpl.shardcast.delta_codec import (
    CHUNK_BYTES_MAX,
    CODING_NAMES,
    PLANES,
    RAW,
    SAME,
    SPARSE,
)
from refimpl.shardcast.delta_sparse import decode_sparse, encode_sparse, exponent_classes
from refimpl.shardcast.increment import Applier, Comparison
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Header, Manifest, Stretch, increment_header
from refimpl.shardcast.shelf import increment_layout
from refimpl.shardcast.store import VersionStore
from refimpl.shardcast.tensors import OPAQUE, Span, spans

ORIGIN = Identity.from_seed(1, "origin")
BF16_CLASSES = exponent_classes("BF16")


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits, to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def training_step(count: int, learning_rate: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """bf16 weights before and after eight Adam steps that mostly agree: moves of up to 8 learning rates."""
    rng = np.random.default_rng(seed)
    master = (0.05 * rng.standard_normal(count)).astype(np.float32)
    moved = master + (8 * learning_rate * rng.uniform(-1, 1, count)).astype(np.float32)
    return bf16(master), bf16(moved)


def safetensors(tensors: dict[str, tuple[str, np.ndarray]], metadata: str = "pt") -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": metadata}}
    body = b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def layout_of(files: dict[str, bytes], shard_bytes: int = 5_003) -> Layout:
    return Layout(names=tuple(files), sizes_bytes=tuple(map(len, files.values())), shard_bytes=shard_bytes)


def between(base: dict[str, bytes], target: dict[str, bytes], chunk_bytes: int = 4096) -> tuple[bytes, list[Chunk]]:
    old, new = b"".join(base.values()), b"".join(target.values())
    chunks = plan_chunks(
        spans(layout_of(base), lambda at, size: old[at : at + size]),
        spans(layout_of(target), lambda at, size: new[at : at + size]),
        chunk_bytes,
    )
    pieces = encode_increment(
        lambda at, size: old[at : at + size], len(old), lambda at, size: new[at : at + size], len(new), chunks
    )
    return b"".join(pieces), chunks


def applied(increment: bytes, base: dict[str, bytes], target_bytes: int, piece_bytes: int = 1 << 30) -> bytes:
    old = b"".join(base.values())
    decoder = IncrementDecoder(lambda at, size: old[at : at + size], len(old), target_bytes)
    out = []
    for at in range(0, len(increment), piece_bytes):
        out += [bytes(piece) for piece in decoder.feed(increment[at : at + piece_bytes])]
    decoder.finish()
    return b"".join(out)


# ------------------------------------------------------------------------------------------------------- the codings
def packed(bits: str) -> bytes:
    """Bits, the first one lowest, in whole words of 64."""
    bits = bits.replace(" ", "")
    bits += "0" * (-len(bits) % 64)
    return int(bits[::-1], 2).to_bytes(len(bits) // 8, "little")


def test_a_sparse_chunk_by_hand() -> None:
    """Weights of exponent −4 (class 4) at 0, 1, 3, 4, of exponent −1 (class 1) at 2, 5; changed: 1, 2 and 4."""
    old = bf16(np.array([0.07, 0.07, 0.6, 0.07, 0.07, 0.6]))
    new = old + np.array([0, 1, 65535, 0, 300, 0], np.uint16)  # +1; −1; +300
    bits = (
        "0 10"  # class 1: its first weight changes (gap 0), by one small step (calm 1)
        "10 10"  # class 4: one weight stays (gap 1), then one small step
        "0 10"  # weight 1: up, by one; then one of its class stays
        "1 10"  # weight 2: down, by one; then one of its class stays
        "0 111111110 11010100 0 0"  # weight 4: up, by 1 + 2^8 + 43; no calm and no gap after it
    )
    payload = encode_sparse(old, new, BF16_CLASSES)
    assert payload is not None and payload == struct.pack("<IBB", 1 << 1 | 1 << 4, 0, 0) + packed(bits)
    assert (decode_sparse(old, memoryview(payload), BF16_CLASSES) == new).all()


def test_classes_are_powers_of_two() -> None:
    for exponent in range(0, 24):
        value = bf16(np.array([1.5 * 2.0**-exponent, -(2.0**-exponent)]))
        assert BF16_CLASSES[value >> 7].tolist() == [exponent] * 2
    assert BF16_CLASSES[bf16(np.array([0.0, 1e-30, 1.0, 3e5])) >> 7].tolist() == [23, 23, 0, 0]
    half = np.array([1.5, 2.0**-6, 0.0], np.float16).view(np.uint16)
    assert exponent_classes("F16")[half >> 7].tolist() == [0, 6, 15]


@pytest.mark.parametrize("kind", ["U8", "BF16", "F16", "U16", "U32", "U64"])
@pytest.mark.parametrize("change", ["none", "few", "steps", "all", "extreme", "new"])
@pytest.mark.parametrize("count", [1, 7, 4099])
def test_every_kind_and_every_change_comes_back_bit_for_bit(kind: str, change: str, count: int) -> None:
    rng = np.random.default_rng(count)
    dtype = np.dtype(f"<u{delta.WIDTHS[kind]}")
    old = rng.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)
    new = old.copy()
    if change == "few":
        new[:: max(1, count // 5)] += dtype.type(1)
    elif change == "steps":
        new = old + rng.integers(-3, 4, count).astype(dtype)
    elif change in ("all", "new"):
        new = rng.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)
    elif change == "extreme":
        new = np.where(rng.random(count) < 0.5, 0, np.iinfo(dtype).max).astype(dtype)
    coding, payload = encode_chunk(None if change == "new" else old, new, kind)
    assert len(payload) <= new.nbytes + 64
    record = struct.pack("<BBHIQI", coding, delta.KIND_CODES.index(kind), 0, new.nbytes, 0, len(payload))
    header = struct.pack("<8sQQ", delta.MAGIC, old.nbytes, new.nbytes)
    assert applied(header + record + payload, {"x": old.tobytes()}, new.nbytes) == new.tobytes()
    if change == "none":
        assert coding == SAME


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 65535)), max_size=600), st.integers(0, 1000))
def test_any_sparse_pair_comes_back(pairs: list[tuple[int, int]], same: int) -> None:
    """Long runs of unchanged weights too (gaps of 255 and more)."""
    old = np.array([pair[0] for pair in pairs] + [0x3C00] * same + [0x3C00], np.uint16)
    new = np.array([pair[1] for pair in pairs] + [0x3C00] * same + [0x3C01], np.uint16)
    payload = encode_sparse(old, new, BF16_CLASSES)
    assert payload is None or (decode_sparse(old, memoryview(payload), BF16_CLASSES) == new).all()


@pytest.mark.parametrize("gap", [0, 18, 19, 20, 21, 40_000])
def test_gaps_around_the_escape(gap: int) -> None:
    """A unary part of 20 and more is written plainly. Here k is 0 when the long gap comes."""
    old = np.full(gap + 103, 0x3D00, np.uint16)
    new = old.copy()
    new[:100] += np.uint16(1)
    new[100 + gap] -= np.uint16(1)
    payload = encode_sparse(old, new, BF16_CLASSES)
    assert payload is not None and (decode_sparse(old, memoryview(payload), BF16_CLASSES) == new).all()


def test_every_step_comes_back() -> None:
    old = np.full(1 << 16, 0x3D8F, np.uint16)
    new = np.arange(1 << 16, dtype=np.uint16)
    padded_old, padded_new = np.tile(old, 3), np.concatenate([old, new, old])
    payload = encode_sparse(padded_old, padded_new, BF16_CLASSES)
    assert payload is not None
    assert (decode_sparse(padded_old, memoryview(payload), BF16_CLASSES) == padded_new).all()
    assert encode_sparse(old, new, BF16_CLASSES) is None  # it gives up where it would not be smaller


def test_the_coding_is_chosen_by_size() -> None:
    old, new = training_step(50_000, 3e-7)
    assert encode_chunk(old, new, "BF16")[0] == SPARSE
    noise = np.random.default_rng(0).integers(0, 65535, 50_000, np.uint16)
    assert encode_chunk(old, noise, "BF16")[0] == RAW
    bits = np.random.default_rng(0).integers(0, 1 << 31, 50_000, np.uint32)
    assert encode_chunk(bits, bits + np.uint32(3), "U32")[0] == PLANES


def test_a_small_step_travels_twenty_times_smaller() -> None:
    """The goal, on weights of width 0.05 that move by up to 8 × 3e-7."""
    old, new = training_step(2_000_000, 3e-7)
    flipped = float((old != new).mean())
    _, payload = encode_chunk(old, new, "BF16")
    ratio = old.nbytes / len(payload)
    assert 0.01 < flipped < 0.06 and ratio > 20
    # not far from the entropy of the step (mostly 0, +1, −1), exponent by exponent
    classes, steps, bits = BF16_CLASSES[old >> 7], new - old, 0.0
    for c in range(24):
        _, counts = np.unique(steps[classes == c], return_counts=True)
        bits -= float((counts * np.log2(counts / counts.sum())).sum())
    assert bits < 8 * len(payload) < 1.08 * bits


# ------------------------------------------------------------------------------------------------- spans and chunks
def weights(seed: int, count: int = 3_001) -> np.ndarray:
    return bf16(np.random.default_rng(seed).standard_normal(count) * 0.05)


def test_spans_cover_the_stream_without_gaps() -> None:
    files = {
        "model.safetensors": safetensors({"a": ("BF16", weights(1)), "b": ("F32", np.zeros(7, np.float32))}),
        "tokenizer.json": b"{}" * 31,
        "broken.safetensors": b"\xff" * 40,
    }
    stream = b"".join(files.values())
    found = spans(layout_of(files), lambda at, size: stream[at : at + size])
    assert [span.offset for span in found[1:]] == [span.offset + span.size for span in found[:-1]]
    assert found[-1].offset + found[-1].size == len(stream)
    assert [span.kind for span in found] == [OPAQUE, "BF16", "U32", OPAQUE, OPAQUE]


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 3}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 3]}}',  # odd length
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [2, 4]}}',  # gap
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 1000]}}',  # beyond the end
        b'{"a": {"dtype": 7, "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [true, 4]}}',
    ],
)
def test_an_irregular_header_makes_an_opaque_file(header: bytes) -> None:
    data = struct.pack("<Q", len(header)) + header + bytes(4)
    found = spans(layout_of({"m.safetensors": data}), lambda at, size: data[at : at + size])
    assert found == [Span(0, len(data), OPAQUE, ("m.safetensors", str(len(data))))]


def test_neighbouring_tensors_share_chunks_and_no_chunk_is_too_long() -> None:
    tensors = {f"t{i}": ("BF16", weights(i, 101)) for i in range(100)}
    files = {"model.safetensors": safetensors(tensors)}
    _, chunks = between(files, files, chunk_bytes=8192)
    assert len(chunks) == 2 + 1 + len(chunks[3:]) and len(chunks) <= 5
    assert max(chunk.size for chunk in chunks) <= 8192 and sum(c.size for c in chunks) == len(
        files["model.safetensors"]
    )
    with pytest.raises(ValueError, match="multiple of 8"):
        plan_chunks([], [], 4097)


# ---------------------------------------------------------------------------------------------------- whole versions
def two_versions() -> tuple[dict[str, bytes], dict[str, bytes]]:
    old, new = training_step(30_011, 3e-7)
    common = weights(5, 2_003)
    base = {
        "model.safetensors": safetensors({"w": ("BF16", old), "same": ("BF16", common), "gone": ("BF16", weights(8))}),
        "config.json": b'{"a": 1}',
    }
    target = {  # moved, grown, changed, with another header
        "config.json": b'{"a": 2}',
        "model.safetensors": safetensors(
            {"same": ("BF16", common), "grown": ("F32", np.ones(11, np.float32)), "w": ("BF16", new)}, "longer"
        ),
    }
    return base, target


@pytest.mark.parametrize("piece_bytes", [1, 17, 4096, 1 << 30])
def test_versions_with_moved_new_and_missing_tensors_come_back_bit_for_bit(piece_bytes: int) -> None:
    base, target = two_versions()
    made, _ = between(base, target)
    whole = b"".join(target.values())
    assert applied(made, base, len(whole), piece_bytes) == whole
    assert len(made) < len(whole) / 20


def stored(root: Path) -> tuple[VersionStore, Manifest, Manifest, dict[str, bytes]]:
    store, manifests = VersionStore(root / "store"), []
    for version, files in enumerate(two_versions(), 1):
        header = Header(run_id="run", version=version, layout=layout_of(files), origin=ORIGIN.public_key)
        sources = []
        for name, data in files.items():
            (root / f"source{version}").mkdir(exist_ok=True)
            (root / f"source{version}" / name).write_bytes(data)
            sources.append(root / f"source{version}" / name)
        assembly = Assembly(store.root, header, sources=sources)
        shards = [digest for _, digest in assembly.cut()]
        manifests.append(Manifest.signed(header, shards, ORIGIN.sign))
        assembly.finish(manifests[-1])
    return store, manifests[0], manifests[1], two_versions()[1]


def compared(store: VersionStore, base: Manifest, target: Manifest) -> Comparison:
    return Comparison(
        partial(store.read, base), base.layout, partial(store.read, target), target.layout, chunk_bytes=4096
    )


def sent(store: VersionStore, base: Manifest, target: Manifest, stretch: Stretch, file: Path) -> Manifest:
    """The increment in this file, as it lies in a client's store."""
    header = increment_header(base, target.header, stretch, increment_layout(file.stat().st_size, 1000))
    assembly = Assembly(store.root, header, sources=[file], copy=True)
    manifest = Manifest.signed(header, [digest for _, digest in assembly.cut()], ORIGIN.sign)
    assembly.finish(manifest)
    return manifest


def apply(store: VersionStore, base: Manifest, increments: list[Manifest], assembly: Assembly, target: Manifest,
          workers: int = 1) -> list[int]:  # fmt: skip
    locks = [threading.Lock() for _ in target.shards_sha256]
    return Applier(store, base, dict(enumerate(target.shards_sha256)), assembly, locks).apply(increments, workers)


@pytest.mark.parametrize("workers", [1, 3])
def test_stretches_become_verified_shards_in_any_order_on_any_number_of_cores(tmp_path: Path, workers: int) -> None:
    store, base, target, files = stored(tmp_path)
    comparison, count = compared(store, base, target), target.layout.shard_count
    assert count > 7
    stretches = [Stretch(first, min(5, count - first)) for first in range(0, count, 5)]
    increments = []
    for stretch in stretches:
        path = tmp_path / f"increment-{stretch.first}"
        assert comparison.write(stretch, path, workers) == path.stat().st_size
        assert path.read_bytes() == written(comparison, stretch, tmp_path / "again")
        increments.append(sent(store, base, target, stretch, path))
    assembly = Assembly(tmp_path / "client", target.header)
    assert apply(store, base, increments[:0:-1], assembly, target, workers) == []
    assert assembly.missing() == list(stretches[0].shards)
    assert apply(store, base, increments, assembly, target, workers) == [] and assembly.missing() == []
    folder = assembly.finish(target)
    assert {name: (folder / name).read_bytes() for name in files} == files


def written(comparison: Comparison, stretch: Stretch, path: Path) -> bytes:
    comparison.write(stretch, path)
    return path.read_bytes()


def test_the_end_of_a_shard_may_cut_an_element_in_two(tmp_path: Path) -> None:
    """Shards of 5003 bytes: every second border lies in the middle of a 16-bit weight."""
    store, base, target, _ = stored(tmp_path)
    comparison = compared(store, base, target)
    for shard in range(target.layout.shard_count):
        chunks = comparison.chunks(shard)
        start = target.layout.shard_offset(shard)
        assert chunks[0].offset == start and sum(c.size for c in chunks) == target.layout.shard_size(shard)
        assert all(c.size % delta.WIDTHS[c.kind] == 0 for c in chunks)
        assert [c.offset for c in chunks[1:]] == [c.offset + c.size for c in chunks[:-1]]
        assert len(chunks) <= 10


def test_a_wrong_increment_leaves_only_the_wrong_shards_to_fetch(tmp_path: Path) -> None:
    """Bit-exact, verified against the manifest: a lie in the increment reaches no final path."""
    store, base, target, files = stored(tmp_path)
    comparison, count = compared(store, base, target), target.layout.shard_count
    honest = bytearray(written(comparison, Stretch(0, count), tmp_path / "honest"))
    lengths = np.frombuffer(honest[-8 * count :], "<u8").tolist()
    liar = sum(lengths[: count - 1])  # the last shard's stream: its only record says that nothing changed
    size = target.layout.shard_size(count - 1)
    stream = struct.pack("<8sQQ", delta.MAGIC, base.layout.size_bytes, size)
    stream += struct.pack("<BBHIQI", SAME, delta.KIND_CODES.index("U8"), 0, size, 0, 0)
    lengths[-1] = len(stream)
    path = tmp_path / "lie"
    path.write_bytes(bytes(honest[:liar]) + stream + np.array(lengths, "<u8").tobytes())
    assembly = Assembly(tmp_path / "client", target.header)
    increment = sent(store, base, target, Stretch(0, count), path)
    assert apply(store, base, [increment], assembly, target, workers=2) == [count - 1] == assembly.missing()
    whole = b"".join(files.values())
    start = target.layout.shard_offset(count - 1)
    writer = assembly.writer(count - 1)  # fetched from a relay
    writer.write(whole[start:], "relay")
    writer.finish(target.shards_sha256[count - 1])
    assembly.finish(target)


@pytest.mark.parametrize("bad", [b"", b"xx", bytes(16), struct.pack("<QQ", 1 << 63, 1 << 63)])
def test_an_increment_that_is_none_is_refused(tmp_path: Path, bad: bytes) -> None:
    store, base, target, _ = stored(tmp_path)
    (tmp_path / "bad").write_bytes(b"12345678" + bad)
    increment = sent(store, base, target, Stretch(0, 2), tmp_path / "bad")
    with pytest.raises(DeltaError):
        apply(store, base, [increment], Assembly(tmp_path / "client", target.header), target)


# ----------------------------------------------------------------------------------------------------- hostile bytes
BASE = {"x": bf16(np.full(5_120, 0.07)).tobytes()}  # all in class 4
TARGET_BYTES = 10_240


def increment(*records: bytes, base_bytes: int = 10_240, target_bytes: int = TARGET_BYTES) -> bytes:
    return struct.pack("<8sQQ", b"SHRDDLT1", base_bytes, target_bytes) + b"".join(records)


def record(
    coding: int, kind: str, size: int, at: int, payload: bytes, zero: int = 0, length: int | None = None
) -> bytes:
    code = delta.KIND_CODES.index(kind)
    return struct.pack("<BBHIQI", coding, code, zero, size, at, len(payload) if length is None else length) + payload


def stream(raw_length: int, coded: bytes) -> bytes:
    return struct.pack("<II", raw_length, len(coded)) + coded


def zstd(data: bytes) -> bytes:
    coded: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return coded


def sparse(bits: str, *, k: int = 0, classes: int = 1 << 4, extra: bytes = b"") -> bytes:
    """A sparse chunk of 10 weights."""
    return record(SPARSE, "BF16", 20, 0, struct.pack("<IB", classes, k) + packed(bits) + extra)


ONE_CHANGE = "1110 10  0 1111110"  # three stay, one small step is announced: up; six stay
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "other magic": b"GZIPGZIP" + bytes(40),
    "other base": increment(base_bytes=5),
    "other target": increment(target_bytes=5),
    "unknown coding": increment(record(9, "U8", 100, 0, b"")),
    "reserved field set": increment(record(SAME, "U8", 100, 0, b"", zero=1)),
    "zero bytes": increment(record(SAME, "U8", 0, 0, b"")),
    "odd size": increment(record(SAME, "BF16", 3, 0, b"")),
    "chunk beyond the limit": increment(record(SAME, "U8", CHUNK_BYTES_MAX + 1, 0, b"")),
    "beyond the target": increment(record(SAME, "U8", TARGET_BYTES + 1, 0, b"")),
    "beyond the base": increment(record(SAME, "U8", 100, 10_200, b"")),
    "base offset wraps": increment(record(SAME, "U8", 100, (1 << 64) - 50, b"")),
    "payload longer than its chunk": increment(record(RAW, "U8", 100, 0, b"", length=1 << 31)),
    "same with a payload": increment(record(SAME, "U8", 100, 0, b"x")),
    "sparse bytes": increment(record(SPARSE, "U8", 100, 0, bytes(4))),
    "no mask": increment(record(SPARSE, "BF16", 100, 0, b"xx")),
    "unknown class": increment(record(SPARSE, "BF16", 100, 0, struct.pack("<I", 1 << 24))),
    "stream breaks off": increment(record(RAW, "U8", 100, 0, struct.pack("<II", 100, 90) + bytes(10))),
    "lengths break off": increment(record(RAW, "U8", 100, 0, b"1234")),
    "left over": increment(record(RAW, "U8", 100, 0, stream(100, bytes(100)) + b"x")),
    "too short": increment(record(RAW, "U8", 100, 0, stream(99, bytes(99)))),
    "no zstd": increment(record(RAW, "U8", 100, 0, stream(100, b"this is no frame"))),
    "bomb": increment(record(RAW, "U8", 100, 0, stream(100, zstd(bytes(10_000_000))[:60]))),
    "bomb that says so": increment(record(RAW, "U8", 10_000, 0, stream(1 << 31, zstd(bytes(1 << 20))))),
    "zstd of less": increment(record(RAW, "U8", 100, 0, stream(100, zstd(bytes(50))))),
    "plane too short": increment(record(PLANES, "U16", 100, 0, stream(50, bytes(50)) + stream(49, bytes(49)))),
    "Rice parameter": increment(sparse(ONE_CHANGE, k=32)),
    "bits break off": increment(sparse(ONE_CHANGE, extra=b"1234")),
    "bits left over": increment(sparse(ONE_CHANGE, extra=bytes(8))),
    "no bits": increment(record(SPARSE, "BF16", 20, 0, struct.pack("<IB", 1 << 4, 0))),
    "class without its k": increment(record(SPARSE, "BF16", 20, 0, struct.pack("<I", 1 << 4))),
    "class that the base does not have": increment(sparse(ONE_CHANGE, classes=1 << 5)),
    "change beyond the chunk": increment(sparse("1" * 11 + "0 10")),
    "next change beyond the chunk": increment(sparse("1110 10  0 11111110")),
    "fewer stay than there are": increment(sparse("1110 10  0 111110")),
    "small steps announced and not made": increment(sparse("1110 110  0 1111110")),
    "larger step than 16 bits": increment(sparse("1110 0  0 " + "1" * 16 + "0" + "0" * 16 + "0 1111110")),
    "endless ones": increment(sparse("1" * 640)),
    "ends early": increment(record(SAME, "U8", 100, 0, b"")),
    "record breaks off": increment(record(SAME, "U8", TARGET_BYTES, 0, b""), b"\x00\x00"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_increments_are_refused(name: str) -> None:
    with pytest.raises(DeltaError):
        applied(HOSTILE[name], BASE, TARGET_BYTES)


def test_the_same_records_well_formed_are_taken() -> None:
    """So that the table above fails for the reasons that it names."""
    rest = record(SAME, "U8", TARGET_BYTES - 20, 20, b"")
    out = np.frombuffer(applied(increment(sparse(ONE_CHANGE), rest), BASE, TARGET_BYTES), np.uint16)
    base = np.frombuffer(BASE["x"], np.uint16)
    assert np.flatnonzero(out != base).tolist() == [3] and out[3] == base[3] + 1
    largest = sparse("1110 0  0 " + "1" * 15 + "0" + "0" * 15 + "0 1111110")  # 1 + 2^15: down, as 16 bits go
    out = np.frombuffer(applied(increment(largest, rest), BASE, TARGET_BYTES), np.uint16)
    assert out[3] == (int(base[3]) + 1 + (1 << 15)) & 0xFFFF


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        yield bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.2 else changed)


def test_mutated_increments_give_the_right_size_or_a_delta_error() -> None:
    """Never a crash, never an out-of-bounds read, never another length; content is for the manifest to judge."""
    base, target = two_versions()
    good, _ = between(base, target)
    size, refused = sum(map(len, target.values())), 0
    for changed in mutations(good, 400, 7):
        try:
            assert len(applied(changed, base, size)) == size
        except DeltaError:
            refused += 1
    assert refused > 100


def test_memory_is_bounded_by_the_chunk_not_by_the_claim() -> None:
    tracemalloc.start()
    for name in ("bomb", "bomb that says so", "payload longer than its chunk"):
        with pytest.raises(DeltaError):
            applied(HOSTILE[name], BASE, TARGET_BYTES)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_codings_have_names_and_content_hash_of_the_result_is_the_targets() -> None:
    base, target = two_versions()
    made, _ = between(base, target)
    whole = b"".join(target.values())
    assert CODING_NAMES[SPARSE] == "sparse"
    assert hashlib.sha256(applied(made, base, len(whole))).digest() == hashlib.sha256(whole).digest()
