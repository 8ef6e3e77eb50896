"""What the manifest promises: one encoding, one signer, no paths, no contradiction, and a root that means something."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.identity import Identity, verify
from refimpl.shardcast.document import ManifestError, canonical
from refimpl.shardcast.layout import Layout, Piece
from refimpl.shardcast.manifest import (
    MANIFEST_BYTES_MAX,
    Equivocation,
    Expected,
    Header,
    Manifest,
    Opening,
    Ref,
    ShardEntry,
    Stretch,
)
from refimpl.shardcast.merkle import leaf, merkle_path, merkle_root, node, path_leads_to

ORIGIN = Identity.from_seed(1, "origin")
FORGER = Identity.from_seed(1, "forger")
FILES = {"model.safetensors": bytes(range(256)) * 3, "empty.txt": b"", "config.json": b'{"layers": 2}'}


def make(
    files: dict[str, bytes] | None = None, *, version: int = 3, shard_bytes: int = 97, signer: Identity = ORIGIN
) -> Manifest:
    files = FILES if files is None else files
    layout = Layout(names=tuple(files), sizes_bytes=tuple(map(len, files.values())), shard_bytes=shard_bytes)
    header = Header(run_id="run-7", version=version, layout=layout, origin=signer.public_key)
    return Manifest.signed(header, map(sha256, cut(files, shard_bytes)), signer.sign)


def cut(files: dict[str, bytes], shard_bytes: int) -> list[bytes]:
    stream = b"".join(files.values())
    return [stream[i : i + shard_bytes] for i in range(0, len(stream), shard_bytes)]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# ------------------------------------------------------------------------------------------------------- Merkle tree
# Leaves and roots of the reference tests of RFC 6962 (certificate-transparency, merkle_tree_test).
CT_LEAVES = [
    bytes.fromhex(x)
    for x in ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
]
CT_ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def test_the_tree_is_that_of_rfc_6962() -> None:
    for count in range(1, 9):
        assert merkle_root(CT_LEAVES[:count]).hex() == CT_ROOTS[count - 1]


def recursive_root(leaves: list[bytes]) -> bytes:
    """The RFC's own definition: split at the largest power of two below n."""
    if len(leaves) == 1:
        return leaf(leaves[0])
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return node(recursive_root(leaves[:split]), recursive_root(leaves[split:]))


@pytest.mark.parametrize("count", [*range(1, 18), 31, 33])
def test_every_leaf_has_a_path_to_the_root_and_nothing_else_has(count: int) -> None:
    leaves = [bytes([i, 7]) for i in range(count)]
    root = merkle_root(leaves)
    assert root == recursive_root(leaves)
    for index in range(count):
        path = merkle_path(leaves, index)
        assert len(path) <= (count - 1).bit_length()
        assert path_leads_to(root, leaves[index], index, count, path)
        assert not path_leads_to(root, b"other", index, count, path)
        assert not path_leads_to(root, leaves[index], index + 1, count, path) or count == 1
        assert not path_leads_to(root, leaves[index], index, count, (*path, root))
        if path:
            assert not path_leads_to(root, leaves[index], index, count, path[:-1])


def test_a_repeated_last_leaf_changes_the_root() -> None:
    """CVE-2012-2459: with duplication [1, 2, 3] and [1, 2, 3, 3] share a root."""
    assert merkle_root([b"1", b"2", b"3"]) != merkle_root([b"1", b"2", b"3", b"3"])


def test_an_inner_node_is_no_leaf() -> None:
    a, b = leaf(b"a"), leaf(b"b")
    assert merkle_root([a + b]) != node(a, b)


# ----------------------------------------------------------------------------------------------------------- geometry
def test_62_gb_are_1240_shards() -> None:
    layout = Layout(names=("model.safetensors",), sizes_bytes=(62_000_000_000,))
    assert layout.shard_count == 1240 and layout.shard_size(1239) == 50_000_000


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0),
    shard_bytes=st.integers(1, 50),
)
def test_the_pieces_of_all_shards_are_the_files_once_each(sizes: list[int], shard_bytes: int) -> None:
    layout = Layout(names=tuple(f"f{i}" for i in range(len(sizes))), sizes_bytes=tuple(sizes), shard_bytes=shard_bytes)
    seen = [[0] * size for size in sizes]
    for index in range(layout.shard_count):
        pieces = layout.pieces(layout.shard_offset(index), layout.shard_size(index))
        assert sum(piece.size for piece in pieces) == layout.shard_size(index)
        for piece in pieces:
            for at in range(piece.offset, piece.offset + piece.size):
                seen[piece.file][at] += 1
    assert seen == [[1] * size for size in sizes]


def test_a_shard_may_span_files() -> None:
    layout = Layout(names=("a", "b", "c"), sizes_bytes=(5, 0, 7), shard_bytes=11)
    assert layout.pieces(0, 11) == [Piece(0, 0, 5), Piece(2, 0, 6)]
    assert layout.pieces(11, 1) == [Piece(2, 6, 1)]


def test_an_empty_version_is_refused() -> None:
    """H07: an empty file once became a version of 0 shards."""
    with pytest.raises(ManifestError, match="holds 1 to"):
        Layout(names=("model",), sizes_bytes=(0,))


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "a\\b", "", ".", "..", ".hidden", "-rf", "x" * 129, "a\n", "ü", "a\x00", "C:x"],
)
def test_names_are_never_paths(name: str) -> None:
    """H16: `GET //etc/passwd`, `..`."""
    with pytest.raises(ManifestError, match="file name is"):
        Layout(names=(name,), sizes_bytes=(1,))
    with pytest.raises(ManifestError, match="run id is"):
        replace(make().header, run_id=name)


# ---------------------------------------------------------------------------------------------------------- documents
def test_all_three_documents_come_back_as_they_went() -> None:
    manifest = make()
    manifest = replace(manifest, header=replace(manifest.header, previous=Ref(2, "ab" * 32)))
    manifest = Manifest.signed(manifest.header, manifest.shards_sha256, ORIGIN.sign)
    assert Manifest.decode(manifest.encode(), verify, ORIGIN.public_key) == manifest
    opening = Opening.signed(manifest.header, ORIGIN.sign)
    assert Opening.decode(opening.encode(), verify, ORIGIN.public_key) == opening
    entry = ShardEntry.signed(manifest.header, 4, manifest.shards_sha256[4], ORIGIN.sign)
    assert ShardEntry.decode(entry.encode(), manifest.header, verify) == entry


def test_the_content_id_depends_on_the_content_alone() -> None:
    """H06: run id and content hash name a version; how it is numbered or signed does not matter."""
    assert make().content_id == make(version=9, signer=FORGER).content_id
    changed = {**FILES, "config.json": b'{"layers": 3}'}
    assert make().content_id != make(changed).content_id
    assert make(version=9).label == f"v00000009-{make().content_id[:16]}"


def test_a_forged_origin_is_refused() -> None:
    forged = make(signer=FORGER)
    with pytest.raises(ManifestError, match="names the origin"):
        Manifest.decode(forged.encode(), verify, ORIGIN.public_key)
    claimed = replace(forged, header=replace(forged.header, origin=ORIGIN.public_key))
    with pytest.raises(ManifestError, match="is not the origin's"):
        Manifest.decode(claimed.encode(), verify, ORIGIN.public_key)


def test_a_signature_for_one_kind_says_nothing_in_another() -> None:
    header = make().header
    opening = Opening.signed(header, ORIGIN.sign)
    assert not verify(ORIGIN.public_key, canonical("header", header.fields()), opening.signature)


def test_every_flipped_byte_is_refused() -> None:
    raw = make(shard_bytes=300).encode()
    for at in range(len(raw)):
        with pytest.raises(ManifestError):
            Manifest.decode(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], verify, ORIGIN.public_key)


BAD: dict[str, list[object]] = {
    "version": [-1, 1.5, True, "3", None, 10**13],
    "run_id": ["../x", 3, None, "a" * 200],
    "files": [[], {}, [["a"]], [["a", -1]], [["a", True]], [["../a", 1]], [["a", 10**16]], [["a", 1, 2]]],
    "shard_bytes": [0, -5, 1 << 40, "97"],
    "origin": ["xyz", 4, "AB" * 32],
    "previous": [3, [3], [3, "x"], [3, "ab" * 32], [-1, "ab" * 32]],
    "base": [[1, "ab" * 32]],
    "stretch": [[0, 1], 3, [0], [0, -1]],
    "root": ["00" * 32, 5],
    "shards_sha256": [[], ["00"], "x", [7]],
    "signature": ["", "zz" * 64, "AB" * 64, 5],
    "document": ["shardcast/opening/1", 1],
    "extra": [1],
}


@pytest.mark.parametrize("field", BAD)
def test_wrong_fields_are_refused_with_a_sentence(field: str) -> None:
    """Signed by the origin itself, so that the checks of the values are reached."""
    for value in BAD[field]:
        document = json.loads(make().encode()) | {field: value}
        document.pop("signature")
        signed = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        document["signature"] = value if field == "signature" else ORIGIN.sign(signed).hex()
        raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises(ManifestError):
            Manifest.decode(raw, verify, ORIGIN.public_key)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"NaN",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b'{"version":1,"version":1}',
        b"x" * (MANIFEST_BYTES_MAX + 1),
    ],
    ids=lambda raw: f"{raw[:12]!r}",
)
def test_hostile_bytes_are_refused(raw: bytes) -> None:
    for decode in (Manifest.decode, Opening.decode):
        with pytest.raises(ManifestError):
            decode(raw, verify, ORIGIN.public_key)
    with pytest.raises(ManifestError):
        ShardEntry.decode(raw, make().header, verify)


def test_white_space_and_field_order_are_refused() -> None:
    document = json.loads(make().encode())
    for raw in (json.dumps(document, sort_keys=True).encode(), make().encode() + b"\n"):
        with pytest.raises(ManifestError, match="canonical"):
            Manifest.decode(raw, verify, ORIGIN.public_key)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.decode(raw, verify, ORIGIN.public_key)


def test_the_largest_manifest_fits() -> None:
    layout = Layout(names=("model",), sizes_bytes=(65_536,), shard_bytes=1)
    header = Header(run_id="r", version=1, layout=layout, origin=ORIGIN.public_key)
    manifest = Manifest.signed(header, [bytes(32)] * 65_536, ORIGIN.sign)
    assert len(manifest.encode()) < MANIFEST_BYTES_MAX
    assert Manifest.decode(manifest.encode(), verify, ORIGIN.public_key) == manifest
    with pytest.raises(ManifestError, match="take larger shards"):
        Layout(names=("model",), sizes_bytes=(65_537,), shard_bytes=1)


# ------------------------------------------------------------------------------------------------- provisional entries
def entries(manifest: Manifest, signer: Identity = ORIGIN) -> list[ShardEntry]:
    return [ShardEntry.signed(manifest.header, i, h, signer.sign) for i, h in enumerate(manifest.shards_sha256)]


def test_entries_let_shards_travel_before_the_manifest() -> None:
    manifest = make()
    expected = Expected(manifest.header)
    assert expected.known() == [] and expected.sha256(2) is None
    expected.add(entries(manifest)[2])
    assert expected.known() == [2] and expected.sha256(2) == manifest.shards_sha256[2]
    expected.finish(manifest)
    assert expected.known() == list(range(manifest.layout.shard_count))


def test_the_final_manifest_must_agree_with_every_entry() -> None:
    manifest = make()
    expected = Expected(manifest.header)
    lie = ShardEntry.signed(manifest.header, 5, sha256(b"other"), ORIGIN.sign)
    expected.add(lie)
    with pytest.raises(Equivocation, match="shard 5") as caught:
        expected.finish(manifest)
    assert (caught.value.first, caught.value.second) == (lie.encode(), manifest.encode())  # the proof
    assert expected.manifest is None


def test_two_entries_for_one_shard_are_a_proof_against_the_origin() -> None:
    manifest = make()
    expected = Expected(manifest.header)
    expected.add(entries(manifest)[1])
    expected.add(entries(manifest)[1])  # the same again is no contradiction
    with pytest.raises(Equivocation, match="two hashes"):
        expected.add(ShardEntry.signed(manifest.header, 1, sha256(b"other"), ORIGIN.sign))


def test_a_manifest_with_another_header_is_not_the_one_that_was_opened() -> None:
    expected = Expected(make().header)
    with pytest.raises(Equivocation, match="opened"):
        expected.finish(make(version=4))


def test_an_entry_of_another_version_or_size_or_signer_is_refused() -> None:
    manifest, other = make(), make(version=4)
    with pytest.raises(ManifestError, match="another version"):
        ShardEntry.decode(entries(other)[0].encode(), manifest.header, verify)
    with pytest.raises(ManifestError, match="is not the origin's"):
        ShardEntry.decode(entries(manifest, FORGER)[0].encode(), manifest.header, verify)
    short = replace(entries(manifest)[0], size_bytes=96)
    signed = replace(short, signature=ORIGIN.sign(canonical("entry", short.fields())))
    with pytest.raises(ManifestError, match="said to have 96 bytes"):
        ShardEntry.decode(signed.encode(), manifest.header, verify)


def test_an_increment_leads_from_an_older_version_to_its_own() -> None:
    header = make(version=5).header
    good = replace(header, base=Ref(4, "aa" * 32), target=Ref(5, "bb" * 32), stretch=Stretch(2, 3))
    assert good.is_increment and not header.is_increment
    for base, target in ((5, 5), (6, 5), (4, 6)):
        with pytest.raises(ManifestError, match="cannot lead"):
            replace(good, base=Ref(base, "aa" * 32), target=Ref(target, "bb" * 32))
    for field in ("base", "target", "stretch"):
        with pytest.raises(ManifestError, match="its base, its target and the shards"):
            replace(good, **{field: None})
    with pytest.raises(ManifestError, match="at least one shard"):
        replace(good, stretch=Stretch(2, 0))
