"""The published package's layout over real HTTP, both ways; with the package itself where it is.

ARMILLARY_SHARDCAST_PYTHON names a Python that has `shardcast==0.3.2` (it also needs `wget` on the path).
"""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from refimpl.identity import verify
from refimpl.shardcast.blake3 import Blake3
from refimpl.shardcast.cli.package import PackageServer
from refimpl.shardcast.compat import DISTRIBUTION_NAME, PROBE_NAME, Listed, parse_distribution, shard_path
from refimpl.shardcast.disk_store import DiskStore, layout_of
from refimpl.shardcast.origin import Origin
from refimpl.shardcast.serving import ServingConfig
from refimpl.work import Hash
from refimpl.worlds.http import HttpFabric
from tests.shardcast_processes import Process
from tests.shardcast_tree import KEY
from tests.test_shardcast_commands import get

PACKAGE = os.environ.get("ARMILLARY_SHARDCAST_PYTHON", "")
needs_package = pytest.mark.skipif(not PACKAGE, reason="ARMILLARY_SHARDCAST_PYTHON is not set")
CONTENT = os.urandom(1_000_003)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A relay of ours below an origin of ours, with the package's layout beside its own."""
    folder = tmp_path_factory.mktemp("compat")
    (folder / "model.bin").write_bytes(CONTENT)
    key = folder / "key"
    with Process(
        folder / "origin.log", "origin", folder / "model.bin", "--run", "r", "--key", key, "--store", folder / "o",
        "--shard-mb", 0.1,
    ) as origin:  # fmt: skip
        url = origin.wait_for(r"at (http://\S+),")[1]
        with Process(
            folder / "relay.log", "relay", url, "--origin-key", f"{key}.pub", "--store", folder / "r",
            "--compat", "blake3",
        ) as process:  # fmt: skip
            url = process.wait_for(r"relay at (http://\S+)")[1]
            process.wait_for("whole and verified")
            while not get(url, f"/{DISTRIBUTION_NAME}")[1]:
                assert process.running, process.text
            yield url


@pytest.fixture
def package_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """What the package serves, served as it does: a folder of static files, one request at a time, no ranges."""
    folder = tmp_path / "served"
    (folder / "v1").mkdir(parents=True)
    for index in range(11):
        (folder / shard_path(1, index)).write_bytes(CONTENT[index * 100_000 : (index + 1) * 100_000])
    (folder / DISTRIBUTION_NAME).write_text(f"v1: {Blake3(CONTENT).hexdigest()}|11\n")
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


def pull(url: str, folder: Path, *more: object) -> Process:
    return Process(folder / "log", "pull", url, "--compat", "blake3", "--out", folder / "out", *more)


def test_our_relay_lists_a_version_with_its_checksum_once_it_is_whole(relay: str) -> None:
    index = parse_distribution(get(relay, f"/{DISTRIBUTION_NAME}")[1])
    assert index == {1: Listed(Blake3(CONTENT).hexdigest(), 11)}
    shards = [get(relay, f"/{shard_path(1, i)}") for i in range(11)]
    assert {status for status, _ in shards} == {200} and b"".join(body for _, body in shards) == CONTENT
    assert get(relay, f"/{PROBE_NAME}")[0] == 200
    for path in ("/v1/shard_00012.bin", "/v1/shard_000001.bin", "/v2/shard_00001.bin", "/v1/../key", "/model.bin"):
        assert get(relay, path)[0] == 404


def test_a_version_that_is_removed_while_it_is_hashed_is_not_listed_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(CONTENT)
    fabric = HttpFabric(run_seed=1)
    world = fabric.node("origin")
    origin = Origin(world, "run", KEY, verify, ServingConfig(), DiskStore(tmp_path / "o"))
    package = PackageServer(world, origin.server, tmp_path / "o", "sha256")

    async def main() -> list[str]:
        texts = []
        for remove in (True, False):
            await origin.publish(*layout_of(tmp_path / "model.bin", 100_000))
            package.look()
            if remove:
                origin.server.drop(origin.server.hoards[1])
            await world.compute(Hash(size_bytes=0), lambda: None)  # behind what was asked for before
            await world.sleep(0.2)
            texts.append((tmp_path / "o" / DISTRIBUTION_NAME).read_text())
        return texts

    assert [text[:3] for text in fabric.run(main())] == ["", "v2:"]


def test_our_client_takes_a_file_from_the_packages_server(package_server: tuple[str, Path], tmp_path: Path) -> None:
    with pull(package_server[0], tmp_path) as process:
        assert process.wait() == 0, process.text
    assert (tmp_path / "out").read_bytes() == CONTENT
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".partial")]


def test_a_wrong_byte_is_found_and_never_reaches_the_final_path(
    package_server: tuple[str, Path], tmp_path: Path
) -> None:
    url, folder = package_server
    shard = folder / shard_path(1, 4)
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    (tmp_path / "out").write_text("the old version")
    with pull(url, tmp_path) as process:
        assert process.wait() == 1
    assert "the index says" in process.text and (tmp_path / "out").read_text() == "the old version"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".partial")]


def test_a_listed_shard_that_is_gone_ends_the_patience_not_the_hope(
    package_server: tuple[str, Path], tmp_path: Path
) -> None:
    url, folder = package_server
    shard = folder / shard_path(1, 4)
    content = shard.read_bytes()
    shard.unlink()
    with pull(url, tmp_path, "--patience-s", 2) as process:
        assert process.wait() == 1
    assert f"nothing has come for 2 s ({url} answers 404 for /{shard_path(1, 4)})" in process.text
    (first,) = tmp_path.glob(".partial-package-*/000000")  # what came is kept
    first.unlink()
    with pull(url, tmp_path) as process:
        while not first.exists():  # until it is at work
            assert process.running, process.text
            time.sleep(0.05)
        process.terminate()
        assert process.wait() == 1
    shard.write_bytes(content)
    with pull(url, tmp_path) as process:
        assert process.wait() == 0, process.text
    assert (tmp_path / "out").read_bytes() == CONTENT


@pytest.mark.peer
@needs_package
def test_the_packages_client_takes_a_file_from_our_relay(relay: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [PACKAGE, "-m", "shardcast.client_node", "--servers", relay, "--version", "v1", "--output-dir", str(tmp_path),
         "--output-file", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out").read_bytes() == CONTENT


@pytest.mark.peer
@needs_package
def test_our_client_takes_a_file_from_the_packages_origin(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(CONTENT)
    script = (
        "import sys, shardcast; shardcast.initialize(sys.argv[1], 0);"
        "server = shardcast._origin_server.http_server; print(server.server_address[1], flush=True);"
        "shardcast.broadcast(sys.argv[2], 100_000); print('out', flush=True); sys.stdin.read()"
    )
    served = tmp_path / "served"
    process = subprocess.Popen(
        [PACKAGE, "-c", script, str(served), str(tmp_path / "model.bin")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        while process.stdout.readline().strip() != "out":
            assert process.poll() is None
        with pull(f"http://127.0.0.1:{port}", tmp_path) as client:
            assert client.wait() == 0, client.text
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "out").read_bytes() == CONTENT
