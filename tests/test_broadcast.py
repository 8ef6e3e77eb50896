"""A broadcast as a run: its figures against the bound, and every promise of it fires when it is broken."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from refimpl.messages import Blob
from refimpl.shardcast.shelf import MemoryShelf
from sim.__main__ import main
from sim.checkers import EVERY, check
from sim.kinds.broadcast_checks import BROADCAST, BroadcastView
from sim.oversight import Oversight
from sim.run import RunResult, run_scenario
from sim.scenario import ScenarioError, check_raw
from tests.paths import TINY_MODEL
from tests.test_run_twice import cut


def run(raw: dict[str, Any], runs: Path, name: str = "cut") -> RunResult:
    return run_scenario(
        check_raw(raw, name), name=name, seed=3, model_path="calibrated", runs=runs,
        say=lambda line: None, progress=False,
    )  # fmt: skip


def tiny(**changes: Any) -> dict[str, Any]:
    """Two versions of 40 MB from the origin over one relay to six clients."""
    raw = cut("broadcast")
    raw["broadcast"].update({"size_gb": 0.04, "versions": 2, "interval_s": 5.0})
    raw["nodes"] = [group for group in raw["nodes"] if group["role"] != "relay" or group["name"] == "relay-oregon"]
    for group in raw["nodes"]:
        group["count"] = 1
    return raw | changes


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(cut("broadcast"), tmp_path_factory.mktemp("runs"))


def test_its_figure_against_the_bound(result: RunResult) -> None:
    """62 GB at 590 Mbit/s take 62·8/0.59 = 840.7 s; here a hundredth of it, to a tenth of the clients."""
    assert result.ok, (result.ended, result.violations)
    (version,) = result.figures["versions"]
    assert version["complete"] == version["clients"] == 9 and result.figures["unfinished"] == []
    bound_s = result.figures["bound_s"]
    assert bound_s == pytest.approx(8.407, abs=0.001)
    assert bound_s <= version["first_s"] and version["last_s"] < 1.25 * bound_s
    assert result.figures["bytes_sent"] > 9 * 0.62e9


def test_it_leaves_all_that_a_run_leaves(result: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    names = {path.name for path in result.folder.iterdir()}
    assert {"events.jsonl", "summary.json", "table.txt", "completions.png", "trace.json", "report.html"} <= names
    assert main(["why", str(result.folder)]) == 0
    text = capsys.readouterr().out
    assert "cut-3: finished" in text and "AskShard" in text and "Most waiting: " in text
    assert main(["diff", str(result.folder), str(result.folder)]) == 0
    report = (result.folder / "report.html").read_text(encoding="utf-8")
    version = result.figures["versions"][0]
    assert f"<td>{version['median_s']:.1f} s</td>" in report and "9 of 9" in report
    checks = {entry["checker"] for entry in json.loads((result.folder / "summary.json").read_text())["checks"]}
    assert {"clients_have_it", "complete_is_exact", "no_task_failed", "at_rest", "all_released"} <= checks


def test_it_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = run(tiny(), tmp_path)
    assert small.ok, (small.ended, small.violations)
    assert [version["complete"] for version in small.figures["versions"]][-1] == 6
    assert main(["replay", str(small.folder)]) == 0
    assert "identical" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- broken promises
def seen(folder: Path) -> BroadcastView:
    """What the checkers see at the end of a good run."""
    kept: list[Oversight] = []

    class Kept(Oversight):
        def leaks(self) -> list[Any]:
            kept.append(self)
            return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.run.Oversight", Kept)
        run(tiny(), folder)
    view = cast(BroadcastView, kept[0].view)
    assert check(view) == []
    return view


def blobs(view: BroadcastView, name: str) -> dict[int, Blob]:
    hoard = view.clients[name].puller.hoard
    assert hoard is not None and hoard.complete
    return cast(MemoryShelf, hoard.shelf).blobs


def shard_is_changed(view: BroadcastView) -> None:
    shards = blobs(view, view.names[0])
    shards[3] = dataclasses.replace(shards[3], content_id="f" * 64)


def shard_is_short(view: BroadcastView) -> None:
    shards = blobs(view, view.names[0])
    shards[0] = Blob(shards[0].size_bytes - 1, shards[0].content_id)


def complete(view: BroadcastView, version: int, size_bytes: int) -> None:
    event = {"t_ns": view.facts.last_ns, "kind": "complete", "node": view.names[0]}
    view.facts.event({**event, "version": version, "size_bytes": size_bytes})


def unknown_version(view: BroadcastView) -> None:
    complete(view, 7, 40_000_000)


def another_size(view: BroadcastView) -> None:
    complete(view, 1, 39_999_999)


def one_has_nothing(view: BroadcastView) -> None:
    del view.facts.complete[view.names[2]]


def nothing_published(view: BroadcastView) -> None:
    view.facts.out_ns.clear()


PLANTS: list[tuple[str, Callable[[BroadcastView], None]]] = [
    ("complete_is_exact", shard_is_changed),
    ("complete_is_exact", shard_is_short),
    ("only_published_is_complete", unknown_version),
    ("only_published_is_complete", another_size),
    ("clients_have_it", one_has_nothing),
    ("something_was_published", nothing_published),
]


def test_each_promise_fires_on_its_planted_violation(tmp_path: Path) -> None:
    view = seen(tmp_path)
    facts = copy.deepcopy(view.facts)
    shards = dict(blobs(view, view.names[0]))
    for checker, plant in PLANTS:
        plant(view)
        assert {violation.checker for violation in check(view)} == {checker}, plant.__name__
        blobs(view, view.names[0]).update(shards)  # as it was
        view = dataclasses.replace(view, facts=copy.deepcopy(facts))
    assert {checker.__name__ for _, checker in BROADCAST} == {name for name, _ in PLANTS}
    assert check(view) == [] and len(view.checkers) == len(EVERY) + len(BROADCAST)


def test_a_client_without_the_version_is_a_violation_unless_there_is_a_reason(tmp_path: Path) -> None:
    slow = tiny(duration_s=20.0)
    slow["broadcast"]["versions"] = 1
    slow["nodes"][-1]["downlink_mbit_s"] = 1.0
    result = run(slow, tmp_path)
    name = slow["nodes"][-1]["name"]
    assert [v.checker for v in result.violations] == ["clients_have_it"] and not result.ok
    assert result.violations[0].sentence.startswith(f"{name} has ")
    slow["faults"] = [{"kind": "crash", "nodes": [name], "start_s": 1.0}]
    excused = run(slow, tmp_path)
    assert excused.ok, excused.violations
    assert excused.figures["unfinished"] == [{"client": name, "reason": "it is down"}]


def test_an_origin_that_is_never_there_makes_no_good_run(tmp_path: Path) -> None:
    raw = tiny(duration_s=20.0, faults=[{"kind": "crash", "nodes": ["origin"], "start_s": 0.0}])
    result = run(raw, tmp_path)
    assert not result.ok and result.ended == "nothing ever happened: no version was out by 20.000 s"
    assert main(["why", str(result.folder)]) == 0


def events(result: RunResult, client: str) -> list[dict[str, Any]]:
    lines = (result.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["node"] == client]


def with_a_full_disk(end_s: float | None) -> tuple[dict[str, Any], str]:
    """A client whose disk is full from before the second version, at 5 s, on."""
    raw = tiny(duration_s=60.0)
    client = raw["nodes"][-1]["name"]
    raw["faults"] = [{"kind": "disk_full", "nodes": [client], "start_s": 4.0}]
    if end_s is not None:
        raw["faults"][0]["end_s"] = end_s
    return raw, client


def test_a_client_whose_disk_is_full_keeps_its_version_and_says_why(tmp_path: Path) -> None:
    raw, client = with_a_full_disk(None)
    result = run(raw, tmp_path)
    told = events(result, client)
    assert [event["version"] for event in told if event["kind"] == "complete"] == [0]
    assert f"the disk of {client} is full" in {event.get("reason") for event in told}
    assert result.figures["unfinished"] == [{"client": client, "reason": "a fault is in force"}]
    assert result.violations == (), result.violations  # the others have it, and nothing was left lying about
    assert [version["complete"] for version in result.figures["versions"]] == [6, 5]


def test_a_client_takes_the_version_when_its_disk_has_room_again(tmp_path: Path) -> None:
    raw, client = with_a_full_disk(30.0)
    result = run(raw, tmp_path)
    assert result.ok, (result.ended, result.violations)
    ends_s = {e["version"]: e["t_ns"] / 1e9 for e in events(result, client) if e["kind"] == "complete"}
    assert ends_s[0] < 4.0 and 30.0 < ends_s[1] < 40.0  # asked again every 2 s
    assert result.figures["unfinished"] == []


def test_a_disk_that_fills_while_a_version_comes_holds_it_up(tmp_path: Path) -> None:
    raw, client = with_a_full_disk(30.0)
    raw["faults"][0]["start_s"] = 5.2
    raw["nodes"][-1]["downlink_mbit_s"] = 100.0  # 40 MB take 3.2 s: under way when the disk fills
    result = run(raw, tmp_path)
    assert result.ok, (result.ended, result.violations)
    ends_s = {e["version"]: e["t_ns"] / 1e9 for e in events(result, client) if e["kind"] == "complete"}
    assert 30.0 < ends_s[1] < 60.0


def test_a_full_disk_where_nobody_writes_is_refused(tmp_path: Path) -> None:
    raw = cut("adversarial-tiny")
    raw["faults"] = [{"kind": "disk_full", "nodes": ["validator"], "start_s": 1.0}]
    with pytest.raises(ScenarioError, match="fault 0 fills a disk, but no role of a swarm writes to one"):
        run_scenario(
            check_raw(raw, "x"), name="x", seed=1, model_path=str(TINY_MODEL), runs=tmp_path, progress=False
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------- lives and relays
def crashed(name: str, *, kept: bool, **changes: Any) -> dict[str, Any]:
    """`name` dies 1 s into a version of 40 MB that takes its 60 Mbit/s 5.3 s, and is back a second later."""
    raw = tiny(duration_s=120.0, **changes)
    raw["broadcast"].update({"versions": 1, "shard_mb": 1.0})
    for group in raw["nodes"]:
        if group["name"] == name:
            group["downlink_mbit_s"] = 60.0
    raw["faults"] = [{"kind": "crash", "nodes": [name], "start_s": 2.0, "end_s": 3.0, "disk_kept": kept}]
    return raw


@pytest.mark.parametrize("role", ["client", "relay"])
@pytest.mark.parametrize("kept", [True, False])
def test_who_restarts_with_its_disk_goes_on_from_what_it_held(role: str, kept: bool, tmp_path: Path) -> None:
    name = next(group["name"] for group in reversed(tiny()["nodes"]) if group["role"] == role)
    result = run(crashed(name, kept=kept), tmp_path)
    assert result.ok, (result.ended, result.violations)
    told = events(result, name)
    fetched = [(event["version_id"], event["index"]) for event in told if event["kind"] == "shard"]
    assert len(set(fetched)) == 40
    if kept:
        assert "resumed" in {event["kind"] for event in told}
        assert len(fetched) == 40  # no verified shard twice
    else:
        assert "resumed" not in {event["kind"] for event in told}
        assert len(fetched) > 40


def test_an_origin_that_restarts_with_its_disk_publishes_what_is_left(tmp_path: Path) -> None:
    raw = tiny(duration_s=120.0)
    raw["faults"] = [{"kind": "crash", "nodes": ["origin"], "start_s": 3.0, "end_s": 4.0, "disk_kept": True}]
    result = run(raw, tmp_path)
    assert result.ok, (result.ended, result.violations)
    published = [event["version"] for event in events(result, "origin") if event["kind"] == "published"]
    assert published == [0, 1]  # each once, under numbers that are never used again


def test_a_lying_relay_is_named_in_the_figures(tmp_path: Path) -> None:
    raw = cut("broadcast")
    relays = [group for group in raw["nodes"] if group["role"] == "relay"]
    relays[0]["behaviour"] = "flipped-bit"
    result = run(raw, tmp_path)
    assert result.ok, (result.ended, result.violations)
    assert {wrong["relay"] for wrong in result.figures["wrong_shards"]} == {relays[0]["name"]}
    with pytest.raises(ScenarioError, match="Known: honest, flipped-bit, truncated, equivocates"):
        relays[0]["behaviour"] = "boasts"
        check_raw(raw, "x")


def two_levels(reparent_s: float | None) -> dict[str, Any]:
    """origin → two hubs → a leaf below each → clients; what leaves one hub falls to a hundredth meanwhile."""
    raw = tiny(duration_s=120.0)
    raw["broadcast"].update({"versions": 1, "size_gb": 2.0, "shard_mb": 20.0})
    if reparent_s is not None:
        raw["broadcast"]["reparent_s"] = reparent_s
    (relay,) = [group for group in raw["nodes"] if group["role"] == "relay"]
    place = raw["nodes"].index(relay)
    made = [
        relay | {"name": name, "uplink_mbit_s": 2000.0, "downlink_mbit_s": 2000.0, "sources": sources}
        for name, sources in (("hub-a", []), ("hub-b", []), ("leaf-a", ["hub-a"]), ("leaf-b", ["hub-b"]))
    ]
    raw["nodes"][place : place + 1] = made
    for group in raw["nodes"]:
        if group["role"] == "client":
            group["sources"] = ["leaf-a"]
    raw["faults"] = [{"kind": "link", "nodes": ["hub-a"], "direction": "up", "bandwidth_factor": 0.01, "start_s": 3.0}]
    return raw


def test_relays_leave_a_parent_that_becomes_slow_where_the_scenario_lets_them(tmp_path: Path) -> None:
    stuck = run(two_levels(None), tmp_path, "stuck")
    assert stuck.figures["versions"][0]["complete"] == 0  # of 2 GB, at 20 Mbit/s
    moved = run(two_levels(5.0), tmp_path, "moved")
    assert moved.ok, (moved.ended, moved.violations)
    assert moved.figures["last_s"] < 100.0
    assert next(event["before"] for event in events(moved, "leaf-a") if event["kind"] == "moved") == "hub-a"


def test_shards_of_a_gigabyte_end_though_ten_of_them_share_a_line(tmp_path: Path) -> None:
    """1 GB on each of ten connections of a line of 590 Mbit/s: 136 s each, longer than a call of a piece may take."""
    raw = tiny(duration_s=600.0)
    raw["broadcast"].update({"versions": 1, "size_gb": 10.0, "shard_mb": 1000.0})
    for group in raw["nodes"]:
        if group["role"] == "client":
            group.update({"downlink_mbit_s": 590.0, "count": 1})
    result = run(raw, tmp_path)
    assert result.ok, (result.ended, result.violations)
    assert 10e9 * 8 / 590e6 < result.figures["last_s"] < 1.3 * 10e9 * 8 / 590e6
