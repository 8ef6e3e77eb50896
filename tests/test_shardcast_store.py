"""A version on disk: whole or not there, resumed and never fetched twice, and a full disk that harms nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from refimpl.identity import Identity, verify
from refimpl.messages import Blob
from refimpl.shardcast import assembly as assembly_module
from refimpl.shardcast import disk as disk_module
from refimpl.shardcast import store as store_module
from refimpl.shardcast.assembly import MANIFEST_NAME, Assembly
from refimpl.shardcast.disk import DiskFull, ShardMismatch, StoreError, check_space, place
from refimpl.shardcast.disk_store import DiskStore
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Header, Manifest
from refimpl.shardcast.store import VersionStore

ORIGIN = Identity.from_seed(1, "origin")
SHARD_BYTES = 1009


def content(version: int) -> dict[str, bytes]:
    rng = random.Random(version)
    return {"model.safetensors": rng.randbytes(9973), "config.json": rng.randbytes(211), "empty": b""}


def make(version: int = 1, files: dict[str, bytes] | None = None) -> tuple[Manifest, list[bytes]]:
    files = content(version) if files is None else files
    layout = Layout(names=tuple(files), sizes_bytes=tuple(map(len, files.values())), shard_bytes=SHARD_BYTES)
    header = Header(run_id="run", version=version, layout=layout, origin=ORIGIN.public_key)
    stream = b"".join(files.values())
    shards = [stream[i : i + SHARD_BYTES] for i in range(0, len(stream), SHARD_BYTES)]
    return Manifest.signed(header, map(sha256, shards), ORIGIN.sign), shards


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def receive(assembly: Assembly, manifest: Manifest, shards: list[bytes], indices: list[int] | None = None) -> None:
    for index in assembly.missing() if indices is None else indices:
        writer = assembly.writer(index)
        writer.write(shards[index][writer.received :], "relay-1")
        writer.finish(manifest.shards_sha256[index])


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_version_appears_whole_and_at_once(tmp_path: Path) -> None:
    manifest, shards = make()
    store = VersionStore(tmp_path)
    assembly = store.begin(manifest.header)
    order = list(range(len(shards)))
    random.Random(3).shuffle(order)
    for index in order:
        assert not store.holds(manifest)
        receive(assembly, manifest, shards, [index])
    folder = assembly.finish(manifest)
    assert visible(tmp_path) == [manifest.label] and folder == store.folder(manifest)
    for name, data in content(1).items():
        assert (folder / name).read_bytes() == data
    assert store.load(verify, ORIGIN.public_key) == ([manifest], [])


def test_nothing_unverified_reaches_the_final_path(tmp_path: Path) -> None:
    """H01: the original left the corrupt file at its final path."""
    manifest, shards = make()
    assembly = Assembly(tmp_path, manifest.header)
    receive(assembly, manifest, shards, [i for i in range(len(shards)) if i != 4])
    with pytest.raises(StoreError, match="shard 4 of version 1 is not there yet"):
        assembly.finish(manifest)
    writer = assembly.writer(4)
    writer.write(shards[4][:-1] + bytes([shards[4][-1] ^ 1]), "relay-2")
    with pytest.raises(ShardMismatch, match="all of it came from relay-2") as caught:
        writer.finish(manifest.shards_sha256[4])
    assert caught.value.culprit == "relay-2" and caught.value.index == 4
    assert assembly.missing() == [4] and assembly.received(4) == 0  # that one, and only that one, again
    assert visible(tmp_path) == [assembly.folder.name]


def test_a_shard_from_two_sources_blames_neither(tmp_path: Path) -> None:
    manifest, shards = make()
    assembly = Assembly(tmp_path, manifest.header)
    writer = assembly.writer(0)
    writer.write(shards[0][:500], "relay-1")
    writer.write(bytes(SHARD_BYTES - 500), "relay-2")
    with pytest.raises(ShardMismatch) as caught:
        writer.finish(manifest.shards_sha256[0])
    assert caught.value.culprit is None


def test_two_transfers_of_one_shard_never_write_over_each_other(tmp_path: Path) -> None:
    """A hedged request: whoever delivers the next byte first is taken, and hashed; the other's copy is not written."""
    manifest, shards = make()
    assembly = Assembly(tmp_path, manifest.header)
    writer = assembly.writer(0)
    assert writer.write(shards[0][:600], "relay-1") == 600
    hedge = assembly.writer(0)
    assert hedge.write(bytes(500), "liar", offset=100) == 0  # late, and wrong
    assert hedge.write(shards[0][550:700], "relay-2", offset=550) == 100
    with pytest.raises(StoreError, match="up to byte 700, this piece begins at 701"):
        writer.write(shards[0][701:], "relay-1", offset=701)
    assert writer.write(shards[0][600:], "relay-1", offset=600) == SHARD_BYTES - 700
    writer.finish(manifest.shards_sha256[0])
    hedge.finish(manifest.shards_sha256[0])
    assert hedge.write(shards[0][900:], "relay-2", offset=900) == 0
    assert assembly.read(0, 0, SHARD_BYTES) == shards[0]


def test_a_transfer_of_a_dropped_shard_cannot_touch_its_successor(tmp_path: Path) -> None:
    manifest, shards = make()
    assembly = Assembly(tmp_path, manifest.header)
    stale = assembly.writer(0)
    stale.write(bytes(SHARD_BYTES), "liar")
    with pytest.raises(ShardMismatch):
        stale.finish(manifest.shards_sha256[0])
    fresh = assembly.writer(0)
    fresh.write(shards[0], "relay-1")
    for touch in (lambda: stale.write(b"x", "liar", offset=5), lambda: stale.finish(manifest.shards_sha256[0])):
        with pytest.raises(StoreError, match="dropped meanwhile"):
            touch()
    fresh.finish(manifest.shards_sha256[0])


def test_a_body_that_ends_early_is_not_complete_and_one_too_long_is_refused(tmp_path: Path) -> None:
    """H13: a chunked body that ended early counted as complete. The size comes from the signed header."""
    manifest, shards = make()
    assembly = Assembly(tmp_path, manifest.header)
    writer = assembly.writer(2)
    writer.write(shards[2][:333], "relay-1")
    with pytest.raises(StoreError, match="ended after 333 of 1009 bytes"):
        writer.finish(manifest.shards_sha256[2])
    with pytest.raises(StoreError, match="sent more than the 1009 bytes"):
        writer.write(bytes(SHARD_BYTES), "relay-1")
    assert assembly.received(2) == 333  # kept: the next try starts there


def test_it_resumes_by_shard_and_by_byte(tmp_path: Path) -> None:
    manifest, shards = make()
    first = Assembly(tmp_path, manifest.header)
    receive(first, manifest, shards, [0, 3])
    first.writer(5).write(shards[5][:700], "relay-1")
    first.close()
    again = Assembly(tmp_path, manifest.header)
    assert again.missing() == [i for i in range(len(shards)) if i not in (0, 3)]
    writer = again.writer(5)
    assert writer.received == 700 and again.read(5, 690, 99) == shards[5][690:700]
    writer.write(shards[5][700:], "relay-2")
    writer.finish(manifest.shards_sha256[5])
    receive(again, manifest, shards)
    again.finish(manifest)


def test_after_a_reboot_verified_shards_are_hashed_again_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, shards = make()
    first = Assembly(tmp_path, manifest.header)
    receive(first, manifest, shards, [0, 1, 2])
    first.writer(5).write(shards[5][:700], "relay-1")
    file = first.folder / "payload" / "model.safetensors"
    first.close()
    raw = bytearray(file.read_bytes())
    raw[SHARD_BYTES + 5] ^= 1  # shard 1 did not reach the disk as it was
    file.write_bytes(raw)
    monkeypatch.setattr(assembly_module, "boot_id", lambda: b"another boot".ljust(36))
    again = Assembly(tmp_path, manifest.header)
    assert again.verified(0) and again.verified(2)
    assert not again.verified(1) and again.received(1) == 0
    assert again.received(5) == 0


def test_two_processes_never_assemble_the_same_version(tmp_path: Path) -> None:
    manifest, shards = make()
    first = Assembly(tmp_path, manifest.header)
    with pytest.raises(StoreError, match="being assembled"):
        Assembly(tmp_path, manifest.header)
    first.close()
    second = Assembly(tmp_path, manifest.header)
    receive(second, manifest, shards)
    second.finish(manifest)


def test_a_relay_reads_what_has_arrived_and_no_more(tmp_path: Path) -> None:
    """Cut-through: a shard is streamed on while it arrives."""
    manifest, shards = make()
    assembly = Assembly(tmp_path, manifest.header)
    assembly.writer(9).write(shards[9][:1000], "up")  # spans both files
    assert assembly.read(9, 0, 5000) == shards[9][:1000] and assembly.read(9, 1000, 5) == b""
    assert not assembly.verified(9)


def test_a_verified_shard_that_the_final_manifest_contradicts_is_dropped(tmp_path: Path) -> None:
    manifest, shards = make()
    assembly = Assembly(tmp_path, manifest.header)
    other = shards[6][::-1]
    writer = assembly.writer(6)
    writer.write(other, "relay-1")
    writer.finish(sha256(other))  # as a provisional entry had said
    receive(assembly, manifest, shards)
    with pytest.raises(ShardMismatch):
        assembly.finish(manifest)
    assert assembly.missing() == [6] and visible(tmp_path) == [assembly.folder.name]


# -------------------------------------------------------------------------------------------------------- the origin
@pytest.mark.parametrize("copy", [False, True])
def test_the_origin_cuts_as_it_reads(tmp_path: Path, copy: bool) -> None:
    manifest, shards = make()
    sources = []
    for name, data in content(1).items():
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_bytes(data)
        sources.append(tmp_path / "source" / name)
    assembly = Assembly(tmp_path / "store", manifest.header, sources=sources, copy=copy)
    seen = []
    for index, digest in assembly.cut():
        seen.append(digest)
        assert assembly.verified(index) and assembly.read(index, 0, SHARD_BYTES) == shards[index]
    assert tuple(seen) == manifest.shards_sha256
    folder = assembly.finish(manifest)
    assert os.path.samefile(folder / "config.json", sources[1]) is not copy
    (tmp_path / "source" / "config.json").unlink()  # the trainer cleans up; the version stays
    assert (folder / "config.json").read_bytes() == content(1)["config.json"]


def test_a_source_that_is_not_as_announced_is_refused(tmp_path: Path) -> None:
    manifest, _ = make(files={"model": bytes(5000)})
    (tmp_path / "model").write_bytes(bytes(4999))
    with pytest.raises(StoreError, match="4999 bytes, 5000 were announced"):
        Assembly(tmp_path / "store", manifest.header, sources=[tmp_path / "model"])


def test_place_replaces_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")
    for copy in (False, True, False):
        place(tmp_path / "new", tmp_path / "target", copy=copy)
        assert (tmp_path / "target").read_bytes() == b"new"
    assert visible(tmp_path) == ["new", "target"]


# ------------------------------------------------------------------------------------------------------ full disks
def test_too_large_a_version_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    """H20: the disk fills without notice, and GiB and GB are mixed in the message."""
    layout = Layout(names=("model",), sizes_bytes=(5 * 10**13,), shard_bytes=1 << 30)
    header = Header(run_id="run", version=1, layout=layout, origin=ORIGIN.public_key)
    with pytest.raises(DiskFull, match=r"GB free, 50000\.000 GB are needed"):
        VersionStore(tmp_path).begin(header)
    assert visible(tmp_path) == []
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(DiskFull, match="kept in reserve"):
        check_space(tmp_path, 1, reserve_bytes=2 * free)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 kB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_leaves_the_old_version_usable(small_disk: Path) -> None:
    store = VersionStore(small_disk)
    old, shards = make(1)
    assembly = store.begin(old.header)
    receive(assembly, old, shards)
    assembly.finish(old)
    too_large, _ = make(2, {"model": random.Random(1).randbytes(60_000)})
    with pytest.raises(DiskFull, match="MB|GB"):
        store.begin(too_large.header)
    (small_disk / "filler").write_bytes(bytes(14_000))  # between the check and the writing
    third, _ = make(3, {"model": random.Random(1).randbytes(29_000)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "free_bytes", lambda folder: 1 << 40)
        with pytest.raises(DiskFull, match="is full: No space left"):
            store.begin(third.header)
    assert store.clean() == []
    assert store.load(verify, ORIGIN.public_key) == ([old], []) and store.bad_shards(old) == []


def test_a_disk_that_fills_in_mid_shard_keeps_what_was_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, shards = make()
    assembly = Assembly(tmp_path, manifest.header)
    receive(assembly, manifest, shards, [0, 1])
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) > 500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFull):
        assembly.writer(2).write(shards[2], "relay-1")
    monkeypatch.undo()
    assert assembly.received(2) == 0
    receive(assembly, manifest, shards)
    assembly.finish(manifest)


# --------------------------------------------------------------------------------------------- restart and clean-up
def test_orphans_are_cleaned_but_not_what_is_wanted_or_in_use(tmp_path: Path) -> None:
    """H07: an orphan from a crash was never cleaned."""
    store = VersionStore(tmp_path)
    headers = [make(version)[0].header for version in (1, 2, 3)]
    for header in headers:
        store.begin(header).close()
    in_use = store.begin(headers[2])
    (tmp_path / ".trash-v00000000-x").mkdir()
    (tmp_path / ".trash-v00000000-x" / "model").write_bytes(b"x")
    (tmp_path / ".partial-killed-early").mkdir()
    assert store.clean(keep=[headers[0]]) == []
    assert visible(tmp_path) == sorted([store.begin(headers[0]).folder.name, in_use.folder.name])


def test_clean_up_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S10: a clean-up error killed the trainer."""
    store = VersionStore(tmp_path)
    manifest, shards = make()
    assembly = store.begin(manifest.header)
    receive(assembly, manifest, shards)
    assembly.finish(manifest)
    real = os.unlink

    def stubborn(path: str, **more: int) -> None:
        if str(path).endswith("config.json"):
            raise PermissionError(errno.EACCES, "not now", str(path))
        real(path, **more)

    monkeypatch.setattr(store_module.os, "unlink", stubborn)
    problems = store.remove(manifest)
    assert any("not now" in problem.reason for problem in problems)
    assert not store.holds(manifest)  # off its final path all the same
    assert store.clean() != []
    monkeypatch.undo()
    assert store.clean() == [] and visible(tmp_path) == []
    assert store.remove(manifest) == []  # and once more is no harm


@pytest.mark.parametrize("harm", ["truncated", "manifest", "renamed", "symlink", "forged"])
def test_a_bad_folder_is_set_aside_when_the_store_is_opened(tmp_path: Path, harm: str) -> None:
    store = VersionStore(tmp_path)
    for version in (1, 2):
        manifest, shards = make(version)
        assembly = store.begin(manifest.header)
        receive(assembly, manifest, shards)
        folder = assembly.finish(manifest)
    if harm == "truncated":
        os.truncate(folder / "model.safetensors", 9000)
    elif harm == "manifest":
        (folder / MANIFEST_NAME).write_bytes(b"{}")
    elif harm == "renamed":
        folder.rename(tmp_path / "v00000003-0123456789abcdef")
    elif harm == "symlink":
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to("/etc/hostname")
    else:
        forger = Identity.from_seed(2, "forger")
        forged = Manifest.signed(manifest.header, manifest.shards_sha256, forger.sign)
        (folder / MANIFEST_NAME).write_bytes(forged.encode())
    found, problems = store.load(verify, ORIGIN.public_key)
    assert [m.version for m in found] == [1] and len(problems) == 1
    assert len(visible(tmp_path)) == 2 and ".quarantine" in visible(tmp_path)
    assert len(list((tmp_path / ".quarantine").glob("*.txt"))) == 1  # with the reason


def test_quarantine_keeps_the_last_three(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    for number in range(5):
        (tmp_path / f"v{number}").mkdir()
        store.quarantine(tmp_path / f"v{number}", "bad")
    kept = sorted(p.name for p in (tmp_path / ".quarantine").iterdir() if p.is_dir())
    assert kept == ["000003-v2", "000004-v3", "000005-v4"]


def test_rot_is_found_by_shard(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    manifest, shards = make()
    assembly = store.begin(manifest.header)
    receive(assembly, manifest, shards)
    path = assembly.finish(manifest) / "model.safetensors"
    assert store.bad_shards(manifest) == []
    raw = bytearray(path.read_bytes())
    raw[3 * SHARD_BYTES] ^= 0x80
    path.write_bytes(raw)
    assert store.bad_shards(manifest) == [3]


def test_parts_say_where_a_shard_lies_and_read_gives_the_stream(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    manifest, shards = make()
    assembly = store.begin(manifest.header)
    receive(assembly, manifest, shards)
    assembly.finish(manifest)
    joined = b"".join(path.read_bytes()[at : at + size] for path, at, size in store.parts(manifest, 9, 100, 850))
    assert joined == shards[9][100:950] and len(store.parts(manifest, 9, 100, 850)) == 2
    assert store.read(manifest, 9900, 200) == b"".join(content(1).values())[9900:10100]
    for offset, size in ((-1, 5), (1000, 10), (0, -1)):
        with pytest.raises(StoreError, match="outside shard 9"):
            store.parts(manifest, 9, offset, size)


# ------------------------------------------------------------------------------------------------------------- kills
CHILD = """
import sys, time, random
from pathlib import Path
from tests.test_shardcast_store import make
from refimpl.shardcast.assembly import Assembly
root, log = Path(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
manifest, shards = make()
assembly = Assembly(root, manifest.header)
print("ready", flush=True)
for index in assembly.missing():
    writer = assembly.writer(index)
    log.write(f"fetch {index} {writer.received}\\n")
    for at in range(writer.received, len(shards[index]), 101):
        writer.write(shards[index][at:at + 101], "relay")
        time.sleep(0.002)
    writer.finish(manifest.shards_sha256[index])
    log.write(f"verified {index}\\n")
assembly.finish(manifest)
"""


def test_killed_at_random_moments_it_never_fetches_a_verified_shard_again(tmp_path: Path) -> None:
    manifest, _ = make()
    root, log = tmp_path / "store", tmp_path / "log"
    log.touch()
    rng, kills = random.Random(11), 0
    store = VersionStore(root)
    repository = Path(__file__).parent.parent
    while not store.holds(manifest):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(log)], cwd=repository, stdout=subprocess.PIPE
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.12) if kills < 6 else 0.5)
        child.send_signal(signal.SIGKILL)
        kills += child.wait() == -signal.SIGKILL
        child.stdout.close()
    verified: set[str] = set()
    resumed_at = []
    for line in log.read_text().splitlines():
        word, index, *rest = line.split()
        if word == "verified":
            verified.add(index)
        else:
            assert index not in verified
            resumed_at.append(int(rest[0]))
    assert kills >= 3 and max(resumed_at) > 0  # by byte range too
    assert store.bad_shards(manifest) == [] and visible(root) == [manifest.label]


def test_a_version_can_be_read_while_it_moves_to_its_final_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay serves shards of a version in the very moment in which it publishes it."""
    manifest, shards = make()
    shelf = DiskStore(tmp_path).begin(manifest.header)
    for index, shard in enumerate(shards):
        shelf.write(index, 0, Blob(len(shard), "", shard), "relay-1")
        shelf.check(index, manifest.shards_sha256[index])
    moved, move = threading.Event(), Assembly.move

    def slow(assembly: Assembly, manifest: Manifest) -> Path:
        target = move(assembly, manifest)
        moved.set()
        time.sleep(0.05)
        return target

    monkeypatch.setattr(Assembly, "move", slow)
    publishing = threading.Thread(target=shelf.publish, args=(manifest,))
    publishing.start()
    assert moved.wait(5.0) and shelf.read(0, 0, SHARD_BYTES).data == shards[0]
    publishing.join()
    VersionStore(tmp_path).remove(manifest)
    with pytest.raises(StoreError, match="was removed"):
        shelf.read(0, 0, SHARD_BYTES)
