"""One swarm, two worlds: the same roles as simulated nodes and as real processes give the same verdicts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sim.processes import SwarmFailed, run_processes
from sim.run import run_scenario
from sim.scenario import Scenario, load_scenario
from tests.paths import TINY_MODEL


def small(**changes: object) -> Scenario:
    """Orchestrator, ledger, validator, two honest workers, two cheats."""
    scenario = load_scenario("adversarial-tiny")
    keep = ("ledger", "orchestrator", "validator", "honest", "cheat-skips", "cheat-garbage")
    groups = tuple(group for group in scenario.nodes if group.name in keep)
    return scenario.model_copy(update={"nodes": groups, **changes})


def verdicts(folder: Path) -> dict[tuple[str, int, int], tuple[bool, str]]:
    """(worker's key, assignment, index) -> (accepted, code)."""
    found = {}
    for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "judged":
            place = (event["public_key"], event["counter"], event["index"])
            assert place not in found, "judged twice"
            found[place] = (event["accepted"], event["code"])
    return found


def test_simulated_and_real_swarms_give_the_same_verdicts(tmp_path: Path) -> None:
    scenario = small()
    simulated = run_scenario(
        scenario, name="sim", seed=5, model_path=str(TINY_MODEL), runs=tmp_path, say=lambda line: None
    )
    real = run_processes(
        scenario, name="real", seed=5, model_path=str(TINY_MODEL), runs=tmp_path, say=lambda line: None
    )
    in_sim, in_real = verdicts(simulated.folder), verdicts(real.folder)
    assert in_sim == in_real
    assert len(in_sim) == 2 * 2 * 4 + 2 * 4  # two honest workers do both assignments, two cheats are ejected after one
    by_behaviour = {
        row["behaviour"]: (row["submissions"], row["rejected"]["hits"], row["ejected_nodes"])
        for row in real.figures["behaviours"]
    }
    assert by_behaviour == {"honest": (16, 0, 0), "layers-skipped": (4, 4, 1), "proofs-garbage": (4, 4, 1)}
    logs = sorted(path.name for path in (real.folder / "nodes").glob("*.log"))
    assert len(logs) == 8 and all(path.stat().st_size == 0 for path in (real.folder / "nodes").glob("*.log"))


def test_a_node_that_cannot_start_is_named_and_nothing_is_left_running(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SwarmFailed, match="node 'ledger' did not start; its last words: "):
        run_processes(small(), name="broken", seed=1, model_path=str(broken), runs=tmp_path, say=lambda line: None)
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listing


def test_a_node_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    """A process whose standard input closes before the run begins, or during it, ends by itself and cleanly."""
    scenario = small()
    run_scenario(scenario, name="plan", seed=5, model_path=str(TINY_MODEL), runs=tmp_path, say=lambda line: None)
    plan = json.loads((tmp_path / "plan-5" / "summary.json").read_text(encoding="utf-8"))["plan"]
    config = {
        "name": "ledger", "role": "ledger", "behaviour": "honest", "line": {}, "processes": 2, "plan": plan,
        "journal": str(tmp_path / "journal.jsonl"),
    }  # fmt: skip
    path = tmp_path / "node.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    for begun in (False, True):
        process = subprocess.Popen(
            [sys.executable, "-m", "refimpl.node", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            assert url.startswith("http://127.0.0.1:")
            if begun:
                process.stdin.write(json.dumps({"book": {"ledger": url}}) + "\n")
                process.stdin.flush()
            process.stdin.close()
            process.stdin = None  # communicate() must not close it again
            _, words = process.communicate(timeout=60)
            assert (process.returncode, words) == (0, "")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
