"""Every shipped scenario, cut to a size that suits a test, writes the same log twice in one process and under another
hash seed. (`adversarial` is `adversarial-tiny` with a larger model, and runs in minutes: it is left to `make sim`.)"""

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

from sim.broadcast import run_broadcast
from sim.run import run_scenario
from sim.scenario import check_raw, known_scenarios, read_raw, scenario_path
from tests.paths import TINY_MODEL

CUT: dict[str, dict[str, Any]] = {
    "adversarial-tiny": {},
    "churn": {"duration_s": 16_000.0, "count": 5},
    "continents": {"count": 2},
    "stress-10k": {"duration_s": 3600.0, "count": 100},
}
ELSEWHERE = {"adversarial", "broadcast"}
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
    for group in raw["nodes"]:
        if "count" in change and "count" in group:
            group["count"] = max(1, group["count"] // change["count"])
    raw["faults"] = [fault for fault in raw.get("faults", []) if fault["start_s"] < raw["duration_s"]]
    for fault in raw["faults"]:
        fault["nodes"] = [node.partition("-")[0] for node in fault.get("nodes", [])]
    return raw


def test_no_shipped_scenario_is_forgotten() -> None:
    assert set(known_scenarios()) - ELSEWHERE == set(CUT)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_the_same_log_twice_in_one_process_and_under_another_hash_seed(name: str, tmp_path: Path) -> None:
    raw = cut(name)
    logs = []
    for runs in ("one", "two"):
        result = run_scenario(
            check_raw(raw, name), name="cut", seed=3, model_path=str(TINY_MODEL), runs=tmp_path / runs,
            say=lambda line: None, progress=False,
        )  # fmt: skip
        assert result.ok, result.violations
        logs.append((result.folder / "events.jsonl").read_bytes())
    given = json.dumps([raw, str(TINY_MODEL), str(tmp_path / "three")])
    environment = {**os.environ, "PYTHONHASHSEED": "99", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    subprocess.run([sys.executable, "-c", SCRIPT], input=given, text=True, check=True, env=environment)
    logs.append((tmp_path / "three" / "cut-3" / "events.jsonl").read_bytes())
    assert len(logs[0]) > 10_000
    assert len({hashlib.sha256(log).hexdigest() for log in logs}) == 1


def test_a_broadcast_twice_and_its_figure_against_the_bound(tmp_path: Path) -> None:
    """62 GB at 590 Mbit/s take 62·8/0.59 = 840.7 s; here a hundredth of it, to a tenth of the clients."""
    raw = read_raw(scenario_path("broadcast"))
    raw["broadcast"]["size_gb"] = 0.62
    raw["broadcast"]["shard_mb"] = 5.0
    for group in raw["nodes"]:
        group["count"] = max(1, group.get("count", 1) // 10)
    logs = []
    for runs in ("one", "two"):
        folder, figures = run_broadcast(
            check_raw(raw, "cut"), name="cut", seed=3, runs=tmp_path / runs, say=lambda line: None, progress=False
        )
        logs.append((folder / "events.jsonl").read_bytes())
        (version,) = figures["versions"]
        assert version["complete"] == version["clients"] == 9
        assert figures["bound_s"] == pytest.approx(8.407, abs=0.001)
        assert figures["bound_s"] <= version["first_s"] and version["last_s"] < 1.25 * figures["bound_s"]
    assert logs[0] == logs[1]
