"""A simulated run: what it leaves, that it is the same every time, and what it says when it cannot go on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refimpl.threads import set_threads
from sim.run import RunResult, run_scenario
from sim.scenario import load_scenario
from tests.paths import TINY_MODEL


def run(folder: Path, seed: int = 1) -> RunResult:
    scenario = load_scenario("adversarial-tiny")
    set_threads()  # as the command does: sums depend on it
    return run_scenario(
        scenario, name="tiny", seed=seed, model_path=str(TINY_MODEL), runs=folder, say=lambda line: None
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(tmp_path_factory.mktemp("runs"))


def digest(result: RunResult) -> str:
    return hashlib.sha256((result.folder / "events.jsonl").read_bytes()).hexdigest()


def test_it_leaves_a_log_a_summary_a_table_and_two_plots(result: RunResult) -> None:
    names = {path.name for path in result.folder.iterdir()}
    assert {"events.jsonl", "summary.json", "table.txt", "scores.png", "detections.png"} <= names
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["events_sha256"] == digest(result)
    assert summary["false_positives"]["hits"] == 0 and summary["false_positives"]["trials"] == 32
    assert summary["nodes"] == 11


def test_honest_workers_are_paid_and_caught_ones_are_ejected_with_nothing(result: RunResult) -> None:
    rows = {row.behaviour: row for row in result.tally.rows}
    assert rows["honest"].earned > 7 and rows["honest"].ejected == 0
    for behaviour in ("layers-skipped", "sign-flipped", "proofs-garbage"):
        row = rows[behaviour]
        assert (row.judged, row.rejected, row.ejected, row.earned) == (4, 4, 1, 0.0)
        assert row.until_ejected_s[0] > 0


def test_the_second_run_in_one_process_writes_the_same_log(result: RunResult, tmp_path: Path) -> None:
    assert digest(run(tmp_path)) == digest(result)


def test_another_hash_seed_writes_the_same_log(result: RunResult, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sim", "run", "adversarial-tiny", "--runs", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "4711"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "adversarial-tiny-1" / "events.jsonl").read_bytes()
    assert hashlib.sha256(log).hexdigest() == digest(result)
    assert "Never caught: weights-4bit." in done.stdout or "were ejected" in done.stdout


def test_another_seed_writes_another_log(result: RunResult, tmp_path: Path) -> None:
    assert digest(run(tmp_path, seed=2)) != digest(result)
