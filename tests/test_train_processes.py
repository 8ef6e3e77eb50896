"""`make train`, shortened: real processes, real sockets, and a model that gets better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refimpl.training import __main__ as training_main
from refimpl.training.__main__ import main
from refimpl.training.launch import LaunchError
from refimpl.training.plan import TrainPlan


@pytest.mark.slow
def test_the_reward_of_a_shortened_run_rises_and_all_promises_are_kept(tmp_path: Path) -> None:
    assert main(["--steps", "30", "--runs", str(tmp_path)]) == 0
    folder = tmp_path / "train-0"
    summary = json.loads((folder / "summary.json").read_text())
    rewards = summary["rewards"]
    assert len(rewards) == 30 and summary["broken_promises"] == []
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.03
    (began, before), *_, (ended, _) = summary["accuracies"]
    assert (began, ended) == (0, 20) and before == summary["accuracy_first"] > 0.2
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


def test_a_run_is_resumed_with_the_settings_that_it_was_begun_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate falls over all steps of the plan: 30 of 200 and 70 of 100 would be the schedule of neither."""
    started: list[int] = []

    def start(plan: TrainPlan, *_: object, **__: object) -> None:
        started.append(plan.steps)
        raise LaunchError("stopped")

    monkeypatch.setattr(training_main, "run_processes", start)
    usual = ["--runs", str(tmp_path), "--cheat", "noise"]
    assert main([*usual, "--steps", "200"]) == main([*usual, "--steps", "200", "--resume"]) == 1
    kept = (tmp_path / "train-0" / "plan.json").read_bytes()
    capsys.readouterr()
    assert main([*usual, "--steps", "100", "--lr", "0.5", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "train-0 was begun with steps = 200, not 100, learning_rate = 0.0005, not 0.5: resume it with" in said
    assert started == [200, 200] and (tmp_path / "train-0" / "plan.json").read_bytes() == kept
    assert main([*usual, "--steps", "100"]) == 1, "a new run may have any"
    assert main([*usual, "--steps", "100", "--resume"]) == 1
    assert started == [200, 200, 100, 100]


def test_a_plan_travels_as_json() -> None:
    plan = TrainPlan(cheats=(("worker-1", "noise"),), length_targets=(3, 5), delta=None)
    assert TrainPlan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
    with pytest.raises(ValueError, match="has no 'stepz'"):
        TrainPlan.from_json({"stepz": 3})
