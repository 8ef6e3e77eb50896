"""Every shipped scenario, cut to a size that suits a test, writes the same log twice in one process and under another
hash seed. Where a scenario has a model, it is the tests' own tiny one."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.run import RunResult, run_scenario
from sim.scenario import check_raw, known_scenarios, read_raw, scenario_path
from tests.paths import TINY_MODEL

ONE_EACH = 1_000_000
"""`count` is divided by this: one node of each group is left."""
SMALL_TRAINING = {
    "units_per_step": 3, "problems_per_unit": 2, "group": 8, "steps": 3, "shard_mb": 1000.0, "connections": 4,
    "checkpoint_gb": 16.0,
}  # fmt: skip
CUT: dict[str, dict[str, Any]] = {
    "adversarial": {"count": ONE_EACH, "task": {"batch": 1}},
    "adversarial-tiny": {},
    "broadcast": {"count": 10, "broadcast": {"size_gb": 0.62, "shard_mb": 5.0}},
    "catalogue-tiny": {"count": ONE_EACH, "task": {"batch": 1}},
    "churn": {"duration_s": 16_000.0, "count": 5},
    "continents": {"count": 2},
    "intellect2": {"count": ONE_EACH, "training": SMALL_TRAINING},
    "intellect2-long": {"count": ONE_EACH, "training": SMALL_TRAINING},
    "pipeline": {"pipeline": {"rounds": 1}},
    "stress-10k": {"duration_s": 3600.0, "count": 100},
    "toploc-alone": {"count": ONE_EACH, "task": {"batch": 1, "assignments": 1}},
    "two-worlds": {},
}
SCRIPT = """
import json, pathlib, sys
from sim.run import run_scenario
from sim.scenario import check_raw
raw, model, runs = json.loads(sys.stdin.read())
scenario, runs = check_raw(raw, "cut"), pathlib.Path(runs)
run_scenario(scenario, name="cut", seed=3, model_path=model, runs=runs, say=lambda line: None, progress=False)
"""


def cut(name: str) -> dict[str, Any]:
    """The scenario with fewer nodes for a shorter time."""
    raw = copy.deepcopy(read_raw(scenario_path(name)))
    change = CUT[name]
    raw["duration_s"] = min(raw["duration_s"], change.get("duration_s", raw["duration_s"]))
    for part in ("broadcast", "pipeline", "task", "training"):
        raw.get(part, {}).update(change.get(part, {}))
    for group in raw["nodes"]:
        if "count" in change and "count" in group:
            group["count"] = max(1, group["count"] // change["count"])
    raw["faults"] = [fault for fault in raw.get("faults", []) if fault["start_s"] < raw["duration_s"]]
    for fault in raw["faults"]:
        if "nodes" in fault:
            fault["nodes"] = [node.partition("-")[0] for node in fault["nodes"]]
    return raw


def run(name: str, runs: Path) -> RunResult:
    return run_scenario(
        check_raw(cut(name), name), name="cut", seed=3, model_path=str(TINY_MODEL), runs=runs,
        say=lambda line: None, progress=False,
    )  # fmt: skip


def test_no_shipped_scenario_is_forgotten() -> None:
    assert set(known_scenarios()) == set(CUT)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_the_same_log_twice_in_one_process_and_under_another_hash_seed(name: str, tmp_path: Path) -> None:
    logs = []
    for runs in ("one", "two"):
        result = run(name, tmp_path / runs)
        assert result.ok, (result.ended, result.violations)
        logs.append((result.folder / "events.jsonl").read_bytes())
    given = json.dumps([cut(name), str(TINY_MODEL), str(tmp_path / "three")])
    environment = {**os.environ, "PYTHONHASHSEED": "99", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    subprocess.run([sys.executable, "-c", SCRIPT], input=given, text=True, check=True, env=environment)
    logs.append((tmp_path / "three" / "cut-3" / "events.jsonl").read_bytes())
    assert len(logs[0]) > 10_000
    assert len({hashlib.sha256(log).hexdigest() for log in logs}) == 1
