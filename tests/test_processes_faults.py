"""Lives and faults on real processes: killed, stopped, slowed and cut off at the instants that the scenario says."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sim import driver as driving
from sim.children import stop_all
from sim.driver import Driver
from sim.journals import Journals
from sim.kinds.swarm import plan_of
from sim.processes import run_processes
from sim.scenario import Scenario, ScenarioError

LINE = {"device": "L4", "uplink_mbit_s": 100.0, "downlink_mbit_s": 100.0, "latency_ms": 10.0}


def scenario(*faults: dict[str, Any], workers: tuple[str, ...] = ("a",), **more: Any) -> Scenario:
    """The services and some workers; every fault is on a worker."""
    roles = [("ledger", "ledger"), ("orchestrator", "orchestrator"), ("validator", "validator")]
    nodes = [{"name": name, "role": role, **LINE} for role, name in [*roles, *(("worker", name) for name in workers)]]
    return Scenario.model_validate(
        {
            "title": "t", "shows": "t", "duration_s": 60.0, "model": {"path": "tests/data/tiny-model"},
            "nodes": nodes, "faults": faults, **more,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Five workers for three seconds, each with a fault of its own from 1.0 s to 2.0 s."""
    when = {"start_s": 1.0, "end_s": 2.0}
    faults = [
        {"kind": "crash", "nodes": ["dies"], **when},
        {"kind": "crash", "nodes": ["forgets"], "disk_kept": False, **when},
        {"kind": "hang", "nodes": ["hangs"], **when},
        {"kind": "slow", "nodes": ["slows"], "slowness": 10.0, **when},
        {"kind": "clock_skew", "nodes": ["slows"], "skew_s": 500.0, **when},
        {"kind": "link", "nodes": ["cut"], "working": False, **when},
    ]
    plan_for = scenario(*faults, workers=("dies", "forgets", "hangs", "slows", "cut"))
    folder = tmp_path_factory.mktemp("run")
    before, driving.NODE = driving.NODE, "tests.small_child"
    driver = Driver(plan_for, plan_of(plan_for, 1, "none"), 1, folder)
    try:
        driver.prepare()
        driver.begin()
        while driver.now_s() < 3.0:
            time.sleep(min(0.02, max(0.0, driver.step())))
    finally:
        driving.NODE = before
        stop_all(driver.close())
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in driver.journals}
    merged = Journals(driver.journals)
    merged.merge(folder / "events.jsonl")
    for _, name, _, record in merged.records:
        found[name].append(record)
    assert merged.torn == 0
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in listing, "something was left running"
    return found


def ticks(records: list[dict[str, Any]], start_s: float, end_s: float) -> list[dict[str, Any]]:
    return [r for r in records if r["kind"] == "tick" and start_s <= r["t_ns"] / 1e9 < end_s]


@pytest.mark.parametrize("name", ["dies", "forgets"])
def test_a_killed_node_is_silent_until_its_successor_begins_and_its_journal_stays(journals: Any, name: str) -> None:
    before, during, after = (ticks(journals[name], *span) for span in ((0, 1.05), (1.05, 2.0), (2.0, 3.0)))
    assert before and after and not during
    begun = [record for record in journals[name] if record["kind"] == "began"]
    assert [record["disk"] for record in begun] == [False, name == "dies"]  # the other's disk was lost
    assert 2.0 <= begun[1]["t_ns"] / 1e9 < 2.3  # it was ready, and only had to begin


def test_a_node_that_hangs_stands_still_and_goes_on_where_it_stood(journals: Any) -> None:
    before, during, after = (ticks(journals["hangs"], *span) for span in ((0, 1.05), (1.05, 2.0), (2.0, 3.0)))
    assert before and after and not during
    assert sum(record["kind"] == "began" for record in journals["hangs"]) == 1


def test_a_slowed_device_and_a_skewed_clock_are_so_for_as_long_as_the_fault_lasts(journals: Any) -> None:
    records = journals["slows"]
    before, during, after = (ticks(records, *span) for span in ((0, 1.0), (1.4, 2.0), (2.4, 3.0)))
    assert min(record["computed_s"] for record in during) >= 0.2
    assert min(record["computed_s"] for record in before + after) < 0.1
    assert all(abs(r["clock_s"] - r["t_ns"] / 1e9 - 500.0) < 0.1 for r in during)
    assert all(abs(r["clock_s"] - r["t_ns"] / 1e9) < 0.1 for r in before + after)


def test_a_node_that_is_cut_off_reaches_nobody_until_it_is_mended(journals: Any) -> None:
    before, during, after = (ticks(journals["cut"], *span) for span in ((0, 1.0), (1.4, 2.0), (2.4, 3.0)))
    assert before and after and not during  # its call stalls, as over a connection, and goes on when the line does
    assert {record["outcome"] for record in before + after} == {"reached"}


def test_the_driver_notes_what_it_did_as_a_simulated_run_does(journals: Any) -> None:
    told = [(r["kind"], r["node"], r.get("fault"), r.get("begins")) for r in journals["(driver)"]]
    assert told.count(("up", "dies", None, None)) == 2 and told.count(("down", "dies", None, None)) == 1
    assert ("fault", "", "link", True) in told and ("fault", "", "link", False) in told
    times_s = [r["t_ns"] / 1e9 for r in journals["(driver)"] if r["kind"] == "fault"]
    assert all(min(abs(t - 1.0), abs(t - 2.0)) < 0.3 for t in times_s)


@pytest.mark.parametrize(
    ("faults", "more", "sentence"),
    [
        ([{"kind": "disk_full", "nodes": ["a"], "start_s": 1.0}], {}, "fault 0 fills a disk"),
        ([{"kind": "slow", "nodes": ["a"], "start_s": 1.0, "slowness": 0.5}], {}, "fault 0 has slowness 0.5; a real"),
        ([], {"network": {"transport": "lv08"}}, "network.transport is 'lv08', a model of TCP"),
    ],
)
def test_what_cannot_be_done_for_real_is_refused_in_a_sentence(
    tmp_path: Path, faults: Any, more: Any, sentence: str
) -> None:
    with pytest.raises(ScenarioError, match=sentence):
        run_processes(scenario(*faults, **more), name="x", seed=1, model_path="none", runs=tmp_path)


def test_a_line_that_a_dying_node_left_unfinished_is_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t_ns":2,"kind":"x","node":"a"}\n{"t_ns":3,"ki{"t_ns":4,"kind":"z","node":"a"}\n{"t_')
    journals = Journals({"a": path, "b": tmp_path / "b.jsonl"})
    assert [record["kind"] for record in journals.fresh()] == ["x"]
    (tmp_path / "b.jsonl").write_text('{"t_ns":1,"kind":"y","node":"b"}\n')
    assert [record["kind"] for record in journals.merge(tmp_path / "all.jsonl")] == ["y", "x"]
    assert journals.torn == 1
    lines = (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["t_ns"] for line in lines] == [1, 2]
