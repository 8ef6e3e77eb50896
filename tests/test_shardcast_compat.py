"""The published package's layout, strictly; and BLAKE3 by its official test vectors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.shardcast.blake3 import Blake3
from refimpl.shardcast.compat import (
    CHECKSUMS,
    CompatError,
    Listed,
    listed,
    parse_distribution,
    parse_shard_path,
    render_distribution,
    shard_path,
)
from refimpl.shardcast.layout import SHARD_BYTES, Layout

A, B = "ab" * 32, "0c" * 32
VECTORS = json.loads((Path(__file__).parent / "data" / "shardcast" / "blake3_vectors.json").read_text())


# ------------------------------------------------------------------------------------------------------------- BLAKE3
def pattern(length: int) -> bytes:
    """The official vectors' input: 0, 1, …, 250, 0, 1, …"""
    return (bytes(range(251)) * (length // 251 + 1))[:length]


@pytest.mark.parametrize("length", sorted(map(int, VECTORS)))
def test_blake3_agrees_with_the_official_implementation(length: int) -> None:
    assert Blake3(pattern(length)).hexdigest() == VECTORS[str(length)]


def test_the_empty_hash_is_the_well_known_one() -> None:
    assert Blake3().hexdigest() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=12))
def test_blake3_does_not_depend_on_how_the_data_is_cut(cuts: list[int]) -> None:
    data, hasher = pattern(31_744), Blake3()
    at = 0
    for cut in cuts:
        hasher.update(data[at : at + cut])
        at = min(len(data), at + cut)
        assert hasher.digest() == hasher.digest()  # asking changes nothing
    hasher.update(memoryview(data)[at:])
    assert hasher.hexdigest() == VECTORS["31744"]


# -------------------------------------------------------------------------------------------------------------- index
def test_the_index_as_the_package_writes_it() -> None:
    """`v{N}: {hex checksum}|{number of shards}`, sorted by number, the newest five."""
    versions = {10: Listed(A, 1240), 9: Listed(B, 3)}
    raw = render_distribution(versions)
    assert raw == f"v9: {B}|3\nv10: {A}|1240\n".encode()
    assert parse_distribution(raw) == versions and parse_distribution(b"") == {}
    many = render_distribution({version: Listed(A, 1) for version in range(1, 9)})
    assert sorted(parse_distribution(many)) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "raw",
    [
        f"v1: {A}|3",  # breaks off: the package rewrites the file in place
        f"v1: {A}\n",  # no number of shards
        f"v1: {A}|0\n",
        f"v1: {A}|99999999\n",
        f"v1: {A}|65537\n",
        f"v1: {A.upper()}|3\n",
        f"v1: {A[:-1]}|3\n",
        f"v-1: {A}|3\n",
        f"v01: {A}|3\n",
        f"1: {A}|3\n",
        f"v1:{A}|3\n",
        f" v1: {A}|3\n",
        f"v1: {A}|3\r\n",
        f"v1: {A}|3\n\n",
        f"v1: {A}|3\nv1: {A}|3\n",
        f"v1/../../x: {A}|3\n",
        "v1: \xe9\n",
        "x" * 70_000,
    ],
)
def test_anything_else_is_refused(raw: str) -> None:
    with pytest.raises(CompatError):
        parse_distribution(raw.encode("latin-1"))


def test_the_line_is_named() -> None:
    with pytest.raises(CompatError, match="line 2"):
        parse_distribution(f"v1: {A}|3\nv2 {B}|3\n".encode())


# -------------------------------------------------------------------------------------------------------------- paths
def test_shards_are_counted_from_one_with_five_digits() -> None:
    """`GET /v{N}/shard_{i:05d}.bin`, i from 1; F-16: 62 GB are 1 240 shards."""
    assert shard_path(3, 0) == "v3/shard_00001.bin"
    last = Layout(names=("model",), sizes_bytes=(62 * 10**9,), shard_bytes=SHARD_BYTES).shard_count - 1
    assert shard_path(12, last) == "v12/shard_01240.bin" and parse_shard_path("/v12/shard_01240.bin") == (12, 1239)
    with pytest.raises(CompatError):
        shard_path(1, -1)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/shard_00000.bin",
        "/v1/shard_1.bin",
        "/v1/shard_000001.bin",
        "/v01/shard_00001.bin",
        "//v1/shard_00001.bin",
        "/v1/../v1/shard_00001.bin",
        "/v1/shard_00001.bin.gz",
        "/v1/shard_00001.bin\n",
        "/v1//shard_00001.bin",
        "/etc/passwd",
        "/v1/shard_٠٠٠٠١.bin",
        "",
    ],
)
def test_only_exact_names_are_shards(path: str) -> None:
    """H16: what is served comes from an index of known names only."""
    assert parse_shard_path(path) is None


def test_a_version_of_ours_as_it_is_listed_there() -> None:
    data = pattern(1000)
    for name, expected in (("blake3", Blake3(data).hexdigest()), ("sha256", hashlib.sha256(data).hexdigest())):
        hasher = CHECKSUMS[name]()
        hasher.update(data)
        layout = Layout(names=("model",), sizes_bytes=(1000,), shard_bytes=300)
        assert listed(layout, hasher.hexdigest()) == Listed(expected, 4)
    with pytest.raises(CompatError, match="one file per version"):
        listed(Layout(names=("a", "b"), sizes_bytes=(1, 1)), A)


# --------------------------------------------------------------------------------------------------- the real package
@pytest.mark.peer
def test_the_real_package_writes_what_we_read_and_reads_what_we_write(tmp_path: Path) -> None:
    utils = pytest.importorskip("shardcast.utils", reason="the published package shardcast is not installed")
    index, data = tmp_path / "distribution.txt", pattern(123_457)
    (tmp_path / "file").write_bytes(data)
    checksum = utils.compute_checksum(str(tmp_path / "file"))
    assert checksum == Blake3(data).hexdigest()
    for version in range(1, 12):
        utils.update_distribution_file(str(index), f"v{version}", checksum, 5, version)
    ours = parse_distribution(index.read_bytes())
    assert ours == {version: Listed(checksum, version) for version in range(7, 12)}
    assert render_distribution(ours) == index.read_bytes()
    assert utils.parse_distribution_file(str(index)) == {f"v{v}": f"{checksum}|{v}" for v in range(7, 12)}
    assert utils.get_shard_filename(1239) == shard_path(1, 1239).split("/")[1]
    layout = Layout(names=("file",), sizes_bytes=(len(data),), shard_bytes=1000)
    assert utils.get_shard_count(len(data), 1000) == layout.shard_count


@pytest.mark.peer
def test_the_real_origin_cuts_as_we_do(tmp_path: Path) -> None:
    origin_server = pytest.importorskip(
        "shardcast.origin_server", reason="the published package shardcast is not installed"
    )
    data = pattern(12_345)
    (tmp_path / "file").write_bytes(data)
    origin = origin_server.OriginServer(str(tmp_path / "served"), port=0)
    try:
        version = origin.broadcast(str(tmp_path / "file"), shard_size=1000)
    finally:
        origin.shutdown()
    assert version == "v1"
    found = parse_distribution((tmp_path / "served" / "distribution.txt").read_bytes())
    layout = Layout(names=("file",), sizes_bytes=(len(data),), shard_bytes=1000)
    assert found == {1: listed(layout, Blake3(data).hexdigest())}
    for index in range(layout.shard_count):
        start = layout.shard_offset(index)
        served = (tmp_path / "served" / shard_path(1, index)).read_bytes()
        assert served == data[start : start + layout.shard_size(index)]
