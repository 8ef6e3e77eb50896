"""`python -m refimpl.shardcast`: real processes, real HTTP, real files."""

from __future__ import annotations

import hashlib
import http.client
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from refimpl.identity import verify
from refimpl.shardcast.__main__ import main
from refimpl.shardcast.cli.keys import load_key, load_or_make_key, read_public_key
from refimpl.shardcast.manifest import Manifest
from refimpl.shardcast.messages import PublishOrder, order_bytes
from refimpl.world import CallError, Signal
from refimpl.worlds.alone import run_alone
from refimpl.worlds.http import HttpWorld
from tests.shardcast_processes import Process, visible

SHARD_MB = 0.25


class Tree(NamedTuple):
    folder: Path
    origin: str  # URL
    relay: str
    key: Path
    first: Path  # what version 1 is

    def pull(self, store: Path, *more: object) -> Process:
        return Process(
            store.with_suffix(".log"), "pull", self.relay, "--origin-key", f"{self.key}.pub", "--store", store, *more
        )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    folder = tmp_path_factory.mktemp("shardcast")
    first, key = folder / "model.safetensors", folder / "origin.key"
    first.write_bytes(os.urandom(3_100_001))
    with Process(
        folder / "origin.log", "origin", first, "--run", "test", "--key", key, "--store", folder / "o",
        "--shard-mb", SHARD_MB,
    ) as origin:  # fmt: skip
        url = origin.wait_for(r"at (http://\S+),")[1]
        with Process(
            folder / "relay.log", "relay", url, "--origin-key", f"{key}.pub", "--store", folder / "r"
        ) as relay:
            yield Tree(folder, url, relay.wait_for(r"relay at (http://\S+)")[1], key, first)


def test_a_file_and_then_a_folder_arrive_whole_under_their_final_name(tree: Tree, tmp_path: Path) -> None:
    store, out = tmp_path / "c", tmp_path / "model.safetensors"
    with tree.pull(store, "--out", out) as pull:
        assert pull.wait() == 0, pull.text
    assert out.read_bytes() == tree.first.read_bytes() == (store / "newest" / tree.first.name).read_bytes()
    assert "whole and verified" in pull.text

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    parts = {f"part-{i}.safetensors": os.urandom(400_003 * i + 1) for i in range(4)}
    for name, content in parts.items():
        (checkpoint / name).write_bytes(content)
    with Process(tmp_path / "push.log", "push", checkpoint, "--origin", tree.origin, "--key", tree.key) as push:
        assert push.wait() == 0, push.text
    with tree.pull(store, "--version", 2) as pull:
        assert pull.wait() == 0, pull.text
    assert {name: (store / "newest" / name).read_bytes() for name in parts} == parts
    # the old version stays as long as the second newest does; nothing half-done is left
    assert [name[:9] for name in visible(store)] == ["newest", "v00000001", "v00000002"]


def test_a_disk_without_room_is_an_error_that_names_it_and_leaves_what_was_there(tree: Tree, tmp_path: Path) -> None:
    store = tmp_path / "c"
    store.mkdir()
    (store / "mine").write_text("untouched")
    with tree.pull(store, "--reserve-gb", 1e9) as pull:
        assert pull.wait() == 1
    assert "GB free" in pull.text and "nothing was changed" in pull.text
    assert visible(store) == ["mine"]


def test_a_forged_origin_key_is_refused_with_a_sentence(tree: Tree, tmp_path: Path) -> None:
    other = load_or_make_key(tmp_path / "other.key")
    with Process(
        tmp_path / "log", "pull", tree.relay, "--origin-key", other.public_key, "--store", tmp_path / "c",
        "--patience-s", 1,
    ) as pull:  # fmt: skip
        assert pull.wait() == 1
    assert "names the origin" in pull.text and visible(tmp_path / "c") == []


@pytest.mark.parametrize(
    "path",
    ["/shard/../../etc/passwd", "//etc/passwd", "/shard//etc/passwd", "/shard/%2e%2e/%2e%2e/etc/passwd",
     "/shard/" + "0" * 64 + "/0", "/shard/v00000001/model.safetensors", "/static/../x"],
)  # fmt: skip
def test_only_known_shards_have_a_name(tree: Tree, path: str) -> None:
    status, body = get(tree.relay, path)
    assert status in (404, 410) and b"root:" not in body


def test_ranges_of_a_shard_are_exactly_the_bytes_asked_for(tree: Tree, tmp_path: Path) -> None:
    with tree.pull(tmp_path / "c", "--version", 1) as pull:
        assert pull.wait() == 0
    header_id = next(iter((tree.folder / "r").glob("v00000001*/.shardcast.json"))).read_text()
    manifest = Manifest.decode(header_id.encode(), verify, load_key(tree.key).public_key)
    name = f"/shard/{manifest.header.id}/3"
    content = tree.first.read_bytes()[3 * 250_000 : 4 * 250_000]
    assert hashlib.sha256(content).digest() == manifest.shards_sha256[3]
    assert get(tree.relay, name) == (200, content)
    assert get(tree.relay, name, "bytes=7-1006") == (206, content[7:1007])
    assert get(tree.relay, name, "bytes=249990-") == (206, content[-10:])
    assert get(tree.relay, name, "bytes=249990-999999") == (206, content[-10:])
    assert get(tree.relay, name, "bytes=250000-")[0] == 416
    assert get(tree.relay, f"/shard/{manifest.header.id}/99")[0] == 410


def test_an_order_that_is_not_signed_by_the_origins_key_is_refused(tree: Tree, tmp_path: Path) -> None:
    load_or_make_key(tmp_path / "other.key")
    with Process(
        tmp_path / "log", "push", tree.first, "--origin", tree.origin, "--key", tmp_path / "other.key"
    ) as push:
        assert push.wait() == 1
    assert "not signed with the origin's key" in push.text


def test_an_origin_that_is_started_again_goes_on_after_what_it_has_published(tmp_path: Path) -> None:
    """No older file comes out again as a newer version."""
    files = [tmp_path / name for name in ("a", "b", "c")]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]) * 1000)

    def said(log: str, *paths: Path) -> str:
        command = ("origin", *paths, "--run", "r", "--key", tmp_path / "key", "--store", tmp_path / "o")
        with Process(tmp_path / log, *command) as origin:
            origin.wait_for(f"version . is (out|{paths[-1]})")
            if log != "again":
                origin.wait_for(f"version {len(paths)} is out")
            return origin.text

    said("first", *files[:2])
    again = said("again", *files[:2])
    assert f"version 2 is {files[1]} already" in again and "is out" not in again
    assert "version 1" not in (more := said("more", *files)) and "version 3 is out" in more
    assert [path.name[:9] for path in sorted((tmp_path / "o").glob("v*"))] == ["v00000001", "v00000002", "v00000003"]


def test_a_run_whose_store_is_lost_uses_no_number_twice(tmp_path: Path) -> None:
    path, key = tmp_path / "model", tmp_path / "key"
    for number in (1, 2):
        path.write_bytes(bytes([number]) * 1000)
        with Process(
            tmp_path / f"{number}.log", "origin", path, "--run", "r", "--key", key, "--store", tmp_path / f"o{number}"
        ) as origin:
            url = origin.wait_for(r"at (http://\S+),")[1]
            origin.wait_for(f"version {number} is out")
            with Process(
                tmp_path / "log", "pull", url, "--origin-key", f"{key}.pub", "--store", tmp_path / "c"
            ) as pull:
                assert pull.wait() == 0, pull.text
        assert (tmp_path / "c" / "newest" / "model").read_bytes() == path.read_bytes()


def test_an_origin_that_has_lost_everything_but_its_key_is_found_out(tmp_path: Path) -> None:
    """It gives version 1 a second content, of the same name and size. The relay says so, and so does who holds the
    first: old bytes never pass for new."""
    path, key = tmp_path / "model", tmp_path / "key"
    contents, labels = [b"old" * 1000, b"new" * 1000], []
    pull = ("pull", "--origin-key", f"{key}.pub", "--patience-s", 3, "--store")
    for number, content in enumerate(contents):
        path.write_bytes(content)
        (tmp_path / "key.r.version").unlink(missing_ok=True)
        origin = Process(
            tmp_path / f"origin{number}.log", "origin", path, "--run", "r", "--key", key,
            "--store", tmp_path / f"o{number}",
        )  # fmt: skip
        with origin:
            url = origin.wait_for(r"at (http://\S+),")[1]
            origin.wait_for("version 1 is out")
            labels.append(next((tmp_path / f"o{number}").glob("v*")).name[10:])
            relay = Process(
                tmp_path / f"relay{number}.log", "relay", url, "--origin-key", f"{key}.pub", "--store", tmp_path / "r"
            )
            with relay:
                below = relay.wait_for(r"relay at (http://\S+)")[1]
                relay.wait_for("two contents" if number else "whole and verified")
                with Process(tmp_path / f"a{number}.log", *pull, tmp_path / "c", url) as direct:
                    assert direct.wait() == number, direct.text
                with Process(tmp_path / f"b{number}.log", *pull, tmp_path / f"fresh{number}", below) as through:
                    assert through.wait() == number, through.text
    for text in (direct.text, through.text):
        assert f"two contents for version 1 of run 'r': {labels[0]}… is here, {labels[1]}… came now" in text


def test_a_version_that_is_here_already_appears_at_out_as_well(tmp_path: Path) -> None:
    path, key = tmp_path / "model", tmp_path / "key"
    path.write_bytes(os.urandom(1000))
    with Process(
        tmp_path / "origin.log", "origin", path, "--run", "r", "--key", key, "--store", tmp_path / "o"
    ) as origin:
        url = origin.wait_for(r"at (http://\S+),")[1]
        origin.wait_for("version 1 is out")
        pull = ("pull", url, "--origin-key", f"{key}.pub", "--store", tmp_path / "c", "--out")
        for out in (tmp_path / "first", tmp_path / "second"):
            with Process(tmp_path / "log", *pull, out) as process:
                assert process.wait() == 0, process.text
            assert out.read_bytes() == path.read_bytes()


def test_an_order_counts_once_whatever_happens_to_the_origin(tmp_path: Path) -> None:
    path, key = tmp_path / "model", tmp_path / "key"
    path.write_bytes(b"x" * 1000)
    identity = load_or_make_key(key)
    unsigned = PublishOrder(str(path), 1000)
    order = PublishOrder(unsigned.path, unsigned.number, identity.sign(order_bytes(unsigned)))

    def send(url: str) -> Any:
        answers: list[Any] = []

        async def ask(world: HttpWorld, stop: Signal) -> int:
            try:
                answers.append(await world.call(url, order, 30.0))
            except CallError as error:
                answers.append(error.reason)
            return 0

        run_alone("push", ask, prepare=None, host="", port=0, run_seed=0)
        return answers[0]

    for round_ in range(2):
        command = ("origin", "--run", "r", "--key", key, "--store", tmp_path / "o")
        with Process(tmp_path / f"origin{round_}.log", *command) as origin:
            url = origin.wait_for(r"at (http://\S+),")[1]
            if round_ == 0:
                assert send(url).version == 1
            assert send(url) == "this order was given before"


def test_an_order_that_cannot_be_carried_out_does_not_end_the_origin(tmp_path: Path) -> None:
    path, key = tmp_path / "model", tmp_path / "key"
    path.write_bytes(b"x" * 1000)
    command = ("origin", "--run", "r", "--key", key, "--store", tmp_path / "o", "--reserve-gb", 1e9)
    with Process(tmp_path / "origin.log", *command) as origin:
        url = origin.wait_for(r"at (http://\S+),")[1]
        for _ in range(2):
            with Process(tmp_path / "push.log", "push", path, "--origin", url, "--key", key) as push:
                assert push.wait() == 1
            assert "GB are kept in reserve" in push.text.splitlines()[-1]
        assert origin.running


def test_keys_are_made_once_and_kept_private(tmp_path: Path) -> None:
    made = load_or_make_key(tmp_path / "k")
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert load_or_make_key(tmp_path / "k").public_key == made.public_key == read_public_key(str(tmp_path / "k.pub"))
    (tmp_path / "k").chmod(0o644)
    with pytest.raises(ValueError, match="may be read by others"):
        load_key(tmp_path / "k")
    with pytest.raises(ValueError, match="neither a public key"):
        read_public_key("nonsense")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["origin", "/nowhere/x", "--run", "r", "--key", "K", "--store", "S"], "/nowhere/x does not exist"),
        (["pull", "ftp://x", "--origin-key", "0" * 64, "--store", "S"], "'ftp://x' is no http://HOST:PORT"),
        (["push", "/nowhere/x", "--origin", "http://127.0.0.1:1", "--key", "K"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    assert sentence in capsys.readouterr().err


def get(url: str, path: str, ranged: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", path, headers={"Range": ranged} if ranged else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
