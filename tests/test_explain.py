"""What a run tells: where the waiting was, what holds up who, where two runs part, and that replays are equal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from refimpl.messages import Blob, Message, Ok, wire
from refimpl.work import Seconds
from sim.__main__ import main
from sim.compare import diff, first_difference, replay
from sim.explain import FINISHED, NoRun, chain_of, why
from sim.link_faults import LinkFault
from sim.record import read_events
from sim.run import RunResult, run_scenario
from sim.trace import Trace
from sim.waits import Reasons, waits_json
from sim.watch import Watch
from sim.world import SimFabric
from tests.swarms import TROUBLED, troubled
from tests.test_events import documented
from tests.worlds import sim_fabric


@wire
@dataclass(frozen=True)
class Job(Message):
    seconds: float


@wire
@dataclass(frozen=True)
class Bale(Message):
    blob: Blob


def silent(line: str) -> None:
    """Say nothing."""


def run(folder: Path, seed: int = 3) -> RunResult:
    return run_scenario(troubled(), name="troubled", seed=seed, model_path="calibrated", runs=folder, say=silent)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(tmp_path_factory.mktemp("runs"))


# -------------------------------------------------------------------------------------------------------- run twice
def test_a_swarm_in_trouble_run_twice_in_one_process_writes_the_same_log(result: RunResult, tmp_path: Path) -> None:
    again = run(tmp_path)
    for name in ("events.jsonl", "waits.json", "trace.json", "summary.json"):
        assert (again.folder / name).read_bytes() == (result.folder / name).read_bytes(), name


def test_a_swarm_in_trouble_writes_the_same_log_under_another_hash_seed(result: RunResult, tmp_path: Path) -> None:
    scenario = tmp_path / "troubled.toml"
    scenario.write_text(TROUBLED, encoding="utf-8")
    command = [sys.executable, "-m", "sim", "run", str(scenario), "--runs", str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "troubled-3" / "events.jsonl").read_bytes()
    assert hashlib.sha256(log).hexdigest() == result.figures["events_sha256"]


def test_tasks_of_a_node_that_dies_end_in_the_order_in_which_they_began() -> None:
    fabric = sim_fabric(7)
    node, ended = fabric.node("a"), []

    async def task(number: int) -> None:
        try:
            await node.signal().wait()
        finally:
            ended.append(number)

    for number in range(100):
        node.spawn(task(number))
    fabric.kernel.run_through(1)
    fabric.kill("a")
    assert ended == list(range(100))


def test_the_swarm_was_in_trouble(result: RunResult) -> None:
    kinds: dict[str, int] = defaultdict(int)
    for event in read_events(result.folder / "events.jsonl"):
        kinds[event["kind"]] += 1
    assert kinds["down"] > 50 and kinds["fault"] == 9 and kinds["ejected"] == 3 and kinds["judged"] > 100
    assert result.ok and result.ended == FINISHED


# ------------------------------------------------------------------------------------------------------------ trace
def test_the_trace_has_a_lane_per_node_and_arrows_from_sending_to_receiving(result: RunResult) -> None:
    trace = json.loads((result.folder / "trace.json").read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert len(names) == result.figures["nodes"] == 26
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(lanes.values()) == {"compute", "serve", "send", "receive", "wait"}
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0 and lanes[event["pid"], event["tid"]] == event["cat"]
            slices[event["pid"], event["tid"]].append(event)
    for lane in slices.values():
        for before, after in pairwise(lane):
            assert after["ts"] >= before["ts"] + before["dur"] - 2e-3, "slices of one lane follow each other"
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) > 2000 and starts.keys() == ends.keys()
    for flow, start in starts.items():
        end = ends[flow]
        assert lanes[start["pid"], start["tid"]] == "send" and lanes[end["pid"], end["tid"]] == "receive"
        assert end["ts"] >= start["ts"] and end["pid"] != start["pid"]
    assert trace["otherData"]["note"].startswith("complete")


def test_compute_lanes_hold_what_the_log_says(result: RunResult) -> None:
    events = json.loads((result.folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    name_of = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    drawn = sorted((name_of[e["pid"]], e["ts"]) for e in events if e["ph"] == "X" and e["cat"] == "compute")
    log = read_events(result.folder / "events.jsonl")
    assert drawn == sorted((e["node"], e["start_ns"] / 1e3) for e in log if e["kind"] == "compute")


def test_a_trace_that_was_cut_says_so(tmp_path: Path) -> None:
    fabric = watched(Trace(events_max=10))
    talk(fabric, seconds=[0.1] * 20)
    fabric.watch.trace.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert re.match(r"cut: 1[01] slices were kept, the limit is 10; .* from \d+\.\d{3} s on is missing", note(trace))
    assert [event for event in trace["traceEvents"] if event["ph"] == "i" and event["s"] == "g"]


def note(trace: dict[str, Any]) -> str:
    return str(trace["otherData"]["note"])


# -------------------------------------------------------------------------------------------------------- the waits
def watched(trace: Trace | None = None) -> Any:
    """Nodes a, b and c; b works on Jobs, c passes them on to b, both take Bales."""
    fabric = sim_fabric(7)
    fabric.watch = Watch(trace=trace)
    for name in "abcd":
        fabric.node(name, lambda work: work.duration_s)

    async def do(source: str, job: Job) -> Message:
        await fabric.nodes["b"].compute(Seconds(duration_s=job.seconds), lambda: None)
        return Ok()

    async def pass_on(source: str, job: Job) -> Message:
        await fabric.nodes["c"].call("b", job, 1000.0)
        return Ok()

    async def take(source: str, bale: Bale) -> Message:
        return Ok()

    fabric.nodes["b"].serve({Job: do, Bale: take})
    fabric.nodes["c"].serve({Job: pass_on, Bale: take})
    return fabric


def begin(fabric: Any, source: str, target: str, *messages: Message) -> None:
    async def call(message: Message) -> None:
        await fabric.nodes[source].call(target, message, 10_000.0)

    for message in messages:
        fabric.nodes[source].spawn(call(message), "calls")


def talk(fabric: Any, seconds: list[float], target: str = "b") -> dict[tuple[str, str], Any]:
    begin(fabric, "a", target, *(Job(duration_s) for duration_s in seconds))
    fabric.kernel.run_through(10**12)
    return {(row["waiting"], row["target"]): row for row in waits_json(fabric, fabric.watch, FINISHED)["waits"]}


def test_waiting_is_split_into_network_device_and_handler() -> None:
    # the second job comes with the first, and waits 2 s for the device before its own 3 s
    row = talk(watched(), [2.0, 3.0])["a", "b"]
    assert (row["count"], row["failed"], row["message"]) == (2, 0, "Job")
    assert row["device_s"] == pytest.approx(2.0 + 5.0, abs=1e-6)
    assert row["handler_s"] == pytest.approx(0.0, abs=1e-9)
    assert 4 * 2e-3 < row["network_s"] < 4 * 2.1e-3, "two calls and two answers, each over two lines of 1 ms"
    assert row["total_s"] == pytest.approx(row["network_s"] + row["device_s"], abs=1e-9)
    assert row["max_s"] == pytest.approx(5.004, abs=1e-3) and row["mean_s"] == row["total_s"] / 2


def test_a_callee_that_waits_itself_counts_as_handler() -> None:
    rows = talk(watched(), [2.0], target="c")
    assert rows["a", "c"]["handler_s"] == pytest.approx(2.004, abs=1e-3) and rows["a", "c"]["device_s"] == 0.0
    assert rows["c", "b"]["device_s"] == pytest.approx(2.0, abs=1e-9)


def test_calls_that_fail_are_counted_as_such() -> None:
    fabric = watched()
    fabric.kill("d")
    begin(fabric, "a", "d", Job(1.0))
    fabric.kernel.run_through(10**10)
    (row,) = waits_json(fabric, fabric.watch, FINISHED)["waits"]
    assert (row["count"], row["failed"]) == (1, 1) and 0.0039 < row["network_s"] < 0.0042


def down(fabric: SimFabric) -> None:
    fabric.nodes["b"].alive = False


def hung(fabric: SimFabric) -> None:
    fabric.nodes["b"].hung = True


def cut(fabric: Any) -> None:
    fabric.network.apply(fabric.now_s(), "cut", LinkFault(node=1, direction="down", working=False))


JOB, BALES = (Job(5.0),), tuple(Bale(Blob(125_000_000, str(i))) for i in range(3))
REASONS: list[tuple[tuple[Message, ...], str, Callable[[Any], None], str]] = [
    (JOB, "b", lambda fabric: None, "device of b busy until 5.002 s"),
    (JOB, "c", lambda fabric: None, "c itself waits for b to answer Job, since 0.002 s"),
    (BALES, "b", lambda fabric: None, "uplink of node 0 shared by 3 flows, 333.3 Mbit/s for it"),
    (BALES[:1], "b", lambda fabric: None, "uplink of node 0 shared by 1 flow, 1000 Mbit/s for it"),
    (JOB, "b", hung, "b hangs"),
    (JOB, "b", down, "b is down"),
    (BALES, "b", cut, "downlink of node 1 is down, since 0.500 s"),
]


@pytest.mark.parametrize(("messages", "target", "trouble", "reason"), REASONS, ids=[reason for *_, reason in REASONS])
def test_an_open_call_has_a_reason(
    messages: tuple[Message, ...], target: str, trouble: Callable[[Any], None], reason: str
) -> None:
    fabric = watched()
    begin(fabric, "a", target, *messages)
    fabric.kernel.run_through(500_000_000)
    trouble(fabric)
    opened = waits_json(fabric, fabric.watch, FINISHED)["open"]
    mine = [call for call in opened if call["waiting"] == "a"]
    assert len(mine) == len(messages)
    assert {call["reason"] for call in mine} == {reason}
    assert {(call["since_s"], call["waited_s"], call["target"]) for call in mine} == {(0.0, 0.5, target)}


def test_a_lost_message_is_called_lost() -> None:
    fabric = watched()
    fabric.network.apply(0.0, "loss", LinkFault(node=1, direction="down", message_loss=1.0))
    begin(fabric, "a", "b", *JOB)
    fabric.kernel.run_through(10**9)
    (call,) = fabric.watch.open.values()
    assert (
        Reasons(fabric).of(call)
        == "the call left a for b at 0.000 s, all its bytes are off the links, and it has not come yet"
    )
    fabric.kernel.at(0, 200 * 10**9, lambda event: None)
    fabric.kernel.run_through(200 * 10**9)
    assert Reasons(fabric).of(call) == "the call left a for b at 0.000 s and was lost"


def test_chains_and_circles_are_told() -> None:
    def call(waiting: str, target: str) -> dict[str, Any]:
        return {"waiting": waiting, "target": target, "reason": f"device of {target} busy until 9 s"}

    chain = chain_of([call("a", "b"), call("b", "c")])
    assert chain == "A chain: a waits for b, which waits for c: device of c busy until 9 s."
    circle = chain_of([call("a", "b"), call("b", "c"), call("c", "a")])
    assert circle == "A circle: a waits for b, which waits for c, which waits for a."
    assert chain_of([call("a", "b"), call("c", "d")]) == "" and chain_of([]) == ""


def test_why_names_the_worst_wait_and_the_open_calls(result: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(result.folder)]) == 0
    text = capsys.readouterr().out
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert f"troubled-3: finished, at {summary['virtual_s']:.3f} s" in text
    assert "fleeting → validator" in text and "Most waiting: " in text
    waits = json.loads((result.folder / "waits.json").read_text(encoding="utf-8"))
    assert waits["waits"] == sorted(waits["waits"], key=lambda row: -row["total_s"])
    for row in waits["waits"]:
        assert row["total_s"] == pytest.approx(row["network_s"] + row["device_s"] + row["handler_s"])


# --------------------------------------------------------------------------------------------- runs that do not end
def test_a_stuck_run_leaves_a_complete_folder_and_says_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], result: RunResult
) -> None:
    def drive(scenario: Any, seed: int, fabric: SimFabric, *rest: Any) -> bool:
        ledger = fabric.node("ledger") if "ledger" not in fabric.nodes else fabric.nodes["ledger"]

        async def never() -> None:
            await ledger.signal().wait()

        ledger.spawn(never(), "waits for a signal that nobody sets")
        fabric.run(never(), node="ledger")
        return True

    monkeypatch.setattr("sim.run._drive", drive)
    scenario = tmp_path / "troubled.toml"
    scenario.write_text(TROUBLED, encoding="utf-8")
    assert main(["run", str(scenario), "--runs", str(tmp_path)]) == 1
    assert "liveness: run_ends: stuck: at 0.000 s nothing can happen any more" in capsys.readouterr().out
    folder = tmp_path / "troubled-3"
    plots_of_nothing = {"scores.png"}
    left = {path.name for path in folder.iterdir()}
    assert {path.name for path in result.folder.iterdir()} - left == plots_of_nothing
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["ended"].startswith("stuck: ")
    assert "ledger: waits for a signal that nobody sets" in why(folder)


def test_a_run_in_which_a_task_fails_says_so_and_keeps_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(role: str, seat: Any) -> None:
        if seat.world.name == "steady-2":
            raise KeyError("lost")
        await seat.stop.wait()

    monkeypatch.setattr("sim.kinds.swarm.take_seat", broken)
    said: list[str] = []
    result = run_scenario(
        troubled(), name="t", seed=3, model_path="calibrated", runs=tmp_path, say=said.append, trace=False
    )
    assert not result.ok and result.ended == "a task failed: node 'steady-2', task 'worker': KeyError: 'lost'"
    assert "crash: no_task_failed: node 'steady-2', task 'worker': KeyError: 'lost'" in said
    assert 'raise KeyError("lost")' in (result.folder / "failure.txt").read_text(encoding="utf-8")
    checks = {check["checker"]: check for check in result.figures["checks"]}
    assert checks["no_task_failed"]["class"] == "crash" and len(checks["no_task_failed"]["violations"]) == 1


# ---------------------------------------------------------------------------------------------------- diff, replay
def test_diff_finds_the_first_event_and_the_figures(
    result: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run(tmp_path, seed=4)
    assert main(["diff", str(result.folder), str(other.folder)]) == 1
    text = capsys.readouterr().out
    logs = [
        (folder / "events.jsonl").read_text(encoding="utf-8").splitlines() for folder in (result.folder, other.folder)
    ]
    first = next(i for i, (a, b) in enumerate(zip(*logs, strict=False)) if a != b)
    time_s = min(json.loads(log[first])["t_ns"] for log in logs) / 1e9
    assert (
        f"The logs part at event {first}, {time_s:.9f} s of virtual time:\n  A {logs[0][first]}\n  B {logs[1][first]}"
        in text
    )
    assert re.search(r"^seed +3 +4$", text, re.MULTILINE)
    assert re.search(r"^behaviours\[honest\].tokens +\d+ +\d+$", text, re.MULTILINE)
    assert diff(result.folder, result.folder) == (True, f"{result.folder} and {result.folder} are identical.")


def test_a_log_that_ends_early_parts_at_its_end(result: RunResult, tmp_path: Path) -> None:
    short = tmp_path / "events.jsonl"
    lines = (result.folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    short.write_bytes(b"".join(lines[:-2]))
    parting = first_difference(short, result.folder / "events.jsonl")
    assert parting is not None and parting.index == len(lines) - 2 and parting.line_a is None
    assert "A (the log has ended)" in str(parting)


def test_a_replay_is_identical(result: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(result.folder)]) == 0
    assert "identical" in capsys.readouterr().out


def test_a_replay_shows_where_a_log_was_changed(result: RunResult, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(result.folder, folder)
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    lines[40] = lines[40].replace('"t_ns":', '"t_ns":1')
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    same, text = replay(folder)
    assert not same and "The logs part at event 40" in text


@pytest.mark.parametrize("command", ["why", "replay", "diff"])
def test_what_is_no_run_is_refused_in_a_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "none")] * (2 if command == "diff" else 1)
    assert main([command, *arguments]) == 2
    assert "the folder of a run was expected" in capsys.readouterr().err
    (tmp_path / "waits.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(NoRun, match="waits.json holds a list; an object was expected"):
        why(tmp_path)


# ---------------------------------------------------------------------------------------------------- documentation
def test_every_kind_and_field_of_the_log_is_documented(result: RunResult) -> None:
    table = documented()
    for event in read_events(result.folder / "events.jsonl"):
        assert event.keys() - {"t_ns", "kind", "node"} in table[event["kind"]], event["kind"]
