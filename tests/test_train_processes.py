"""`make train`, shortened: real processes, real sockets, and a model that gets better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refimpl.training.__main__ import main
from refimpl.training.plan import TrainPlan


@pytest.mark.slow
def test_the_reward_of_a_shortened_run_rises_and_all_promises_are_kept(tmp_path: Path) -> None:
    assert main(["--steps", "30", "--runs", str(tmp_path)]) == 0
    folder = tmp_path / "train-0"
    summary = json.loads((folder / "summary.json").read_text())
    rewards = summary["rewards"]
    assert len(rewards) == 30 and summary["broken_promises"] == []
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.03
    assert summary["age_max"] == 2 and summary["denied"] == 0
    assert 0 < summary["overlap_share"] < 1
    assert {record["ph"] for record in json.loads((folder / "trace.json").read_text())["traceEvents"]} >= {"X", "M"}
    assert (folder / "reward.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_trainer_of_two_processes_keeps_all_promises(tmp_path: Path) -> None:
    """Sharded over both of them, in a whole run; evaluated too."""
    small = ["--steps", "3", "--problems", "2", "--group", "4", "--units", "2"]
    assert main([*small, "--processes", "2", "--runs", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "train-0" / "summary.json").read_text())
    assert summary["versions"] == 3 and summary["broken_promises"] == []


def test_a_wrong_setting_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--lag", "-1", "--runs", str(tmp_path)]) == 2
    assert "max_age is -1, expected 0 (synchronous) or more" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_plan_travels_as_json() -> None:
    plan = TrainPlan(cheats=(("worker-1", "noise"),), length_targets=(3, 5), delta=None)
    assert TrainPlan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
    with pytest.raises(ValueError, match="has no 'stepz'"):
        TrainPlan.from_json({"stepz": 3})
