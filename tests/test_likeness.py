"""One scenario, two worlds: real processes and the simulator agree in verdicts, comings and goings, and times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.compare import replay
from sim.faults import FaultPart
from sim.likeness import BOUND, Likeness, Row, assignments_s, compare_worlds, history, measured_prices, verdicts
from sim.likeness import _histories_that_differ as histories_that_differ
from sim.likeness import _verdicts_that_differ as verdicts_that_differ
from sim.record import read_events
from sim.run import run_scenario
from sim.scenario import Scenario, check_raw, load_scenario, read_raw, scenario_path
from tests.paths import TINY_MODEL


def compared(scenario: Scenario, tmp_path: Path) -> Likeness:
    likeness = compare_worlds(
        scenario, name="two", seed=5, model_path=str(TINY_MODEL), runs=tmp_path, say=lambda line: None
    )
    assert likeness.simulated.ok and likeness.real.ok, (likeness.simulated.ended, likeness.real.ended)
    assert likeness.differences == []
    assert sum(row.counted for row in likeness.rows) >= 3
    assert likeness.apart == [] and likeness.alike, likeness.table()
    return likeness


def judged(events: Path) -> dict[Any, Any]:
    return verdicts([json.loads(line) for line in (events / "events.jsonl").read_text(encoding="utf-8").splitlines()])


@pytest.mark.slow
def test_real_processes_take_as_long_as_simulated_ones(tmp_path: Path) -> None:
    likeness = compared(load_scenario("two-worlds"), tmp_path)
    found = judged(likeness.real.folder)
    assert len(found) == 2 * 2 * 3 + 3  # two honest workers do both assignments, the cheat is ejected after one
    assert {worker for (worker, _, _), (accepted, _) in found.items() if not accepted} == {"cheat"}


@pytest.mark.slow
def test_they_also_agree_when_one_is_killed_and_another_cut_off(tmp_path: Path) -> None:
    """One worker dies while it sends and comes back; another's line is down for two seconds."""
    faults = (
        FaultPart(kind="crash", nodes=("honest-0",), start_s=4.0, end_s=6.0),
        FaultPart(kind="link", nodes=("honest-1",), start_s=4.5, end_s=6.5, working=False),
    )
    likeness = compared(load_scenario("two-worlds").model_copy(update={"faults": faults}), tmp_path)
    found = judged(likeness.real.folder)
    assert {counter for worker, counter, _ in found if worker == "honest-0"} == {2}  # its first assignment is lost
    assert {counter for worker, counter, _ in found if worker == "honest-1"} == {1, 2}


# -------------------------------------------------------------------------------------------------- the comparison
def judgement(time_s: float, counter: int, index: int, accepted: bool = True) -> dict[str, Any]:
    code = "ok" if accepted else "drift"
    where = {"public_key": "k", "counter": counter, "index": index}
    return {"t_ns": round(time_s * 1e9), "kind": "judged", "node": "v", "accepted": accepted, "code": code, **where}


LOG: list[dict[str, Any]] = [
    {"t_ns": 0, "kind": "registered", "node": "l", "worker": "w", "public_key": "k"},
    {"t_ns": 10**9, "kind": "assigned", "node": "o", "worker": "w", "counter": 1},
    judgement(3.0, 1, 0),
    judgement(4.5, 1, 1, accepted=False),
]


def test_an_assignment_lasts_until_its_last_verdict() -> None:
    assert assignments_s(LOG) == {("w", 1): 3.5}


def test_a_verdict_that_differs_or_is_missing_is_told() -> None:
    other = [*LOG[:3], judgement(4.5, 1, 1), judgement(5.0, 2, 0)]
    assert verdicts_that_differ(verdicts(LOG), verdicts(LOG)) == []
    assert verdicts_that_differ(verdicts(LOG), verdicts(other)) == [
        "Answer 1 of assignment 1 of w: simulated rejected, drift; real accepted, ok.",
        "Answer 0 of assignment 2 of w: simulated never judged; real accepted, ok.",
    ]


def test_a_node_that_comes_late_is_told_and_one_that_comes_in_time_is_not() -> None:
    def log(*times_s: float) -> list[tuple[str, str, float]]:
        return history([{"t_ns": round(t * 1e9), "kind": "up", "node": "w"} for t in times_s])

    assert histories_that_differ(log(5.0), log(5.2)) == []
    assert histories_that_differ(log(5.0), log(5.8)) == ["up w: simulated at 5.00 s; real at 5.80 s."]
    assert "some happened more often" in histories_that_differ(log(5.0), log(5.0, 6.0))[0]


def test_only_counted_times_are_held_against_the_bound_and_one_is_needed() -> None:
    near = Row(what="a", simulated_s=[1.0, 1.05, 9.0], real_s=[1.0], counted=True)
    far = Row(what="b", simulated_s=[1.0], real_s=[1.2], counted=True)
    short = Row(what="c", simulated_s=[0.1], real_s=[0.2], counted=False)
    assert near.error == pytest.approx(0.05)

    def of(*rows: Row) -> Likeness:
        some: Any = None
        return Likeness(simulated=some, real=some, rows=list(rows), differences=[], bound=BOUND)

    assert of(near, short).alike and not of(near, far).alike and not of(short).alike
    assert "1 of 2 counted medians are within 10 %" in of(near, far, short).table()


def test_work_costs_what_it_took_on_that_node() -> None:
    def computed(work: str, seconds: float) -> dict[str, Any]:
        return {"kind": "compute", "node": "w", "work": work, "start_ns": 0, "end_ns": round(seconds * 1e9)}

    prices = measured_prices([computed("Verify", 1.0), computed("Verify", 2.0), computed("Verify", 9.0)], ["w", "x"])
    assert prices == {"w": {"Verify": 2.0}, "x": {}}


def test_a_run_at_measured_prices_is_replayed_at_them(tmp_path: Path) -> None:
    """A second for each generation: the replay, without being told, charges a second too."""
    raw = read_raw(scenario_path("churn"))
    raw |= {"duration_s": 300.0, "faults": []}
    for group in raw["nodes"]:
        group.pop("life", None)
        group["count"] = 1
    scenario = check_raw(raw, "churn")
    prices = {member.name: {"Several": 1.0} for member in scenario.members()}
    run = run_scenario(
        scenario, name="priced", seed=3, model_path="calibrated", runs=tmp_path,
        say=lambda line: None, progress=False, prices_s=prices,
    )  # fmt: skip
    computed = [event for event in read_events(run.folder / "events.jsonl") if event["kind"] == "compute"]
    assert computed and all(event["end_ns"] - event["start_ns"] == 10**9 for event in computed)
    same, text = replay(run.folder)
    assert same, text
