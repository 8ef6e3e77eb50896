"""What the command line cannot do is told in one sentence, with exit code 2, before a run leaves a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from sim.__main__ import main
from sim.processes import run_processes
from sim.scenario import ScenarioError, load_scenario, read_raw, scenario_path
from sim.sweep import Cell, run_cell
from tests.paths import TINY_MODEL

MODEL = ["--model", str(TINY_MODEL)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sweep", "broadcast", "--seeds", "0"], "--seeds is 0; at least 1 was expected"),
        (["sweep", "broadcast", "--seeds", "-1"], "--seeds is -1; at least 1 was expected"),
        (["sweep", "broadcast", "--jobs", "0"], "--jobs is 0; a number of processes was expected, or -1"),
        (["sweep", "broadcast", "--set", "nodes=5"], "--set nodes: nodes.FIELD or nodes.GROUP.FIELD was expected"),
        (["sweep", "churn", *MODEL], "no real model runs in this scenario; it is a swarm with a calibrated model"),
        (["run", "churn", *MODEL], "no real model runs in this scenario; it is a swarm with a calibrated model"),
        (["run", "broadcast", *MODEL], "no real model runs in this scenario; it is a broadcast"),
        (["swarm", "broadcast", *MODEL], "only a swarm with a real model (model.path) runs as real processes; it is a"),
        (["swarm", "churn", *MODEL], "runs as real processes; it is a swarm with a calibrated model"),
        (["swarm", "churn", "--compare"], "runs as real processes; it is a swarm with a calibrated model"),
        (["run", "adversarial-tiny", "--model", "no/such/model"], "no/such/model"),
    ],
)
def test_it_is_refused(arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--runs", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("error", [OSError("timed out"), ValueError("unknown address scheme 'x'")])
def test_a_dask_scheduler_that_is_not_there_is_told(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask's client raises OSError when nobody answers, and ValueError for what is no address."""

    def client(address: str) -> None:
        raise error

    module = ModuleType("dask.distributed")
    module.Client = client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask", ModuleType("dask"))
    monkeypatch.setitem(sys.modules, "dask.distributed", module)
    assert main(["sweep", "broadcast", "--dask", "x://here", "--runs", str(tmp_path / "runs")]) == 2
    assert f"--dask x://here: no Dask scheduler was reached: {error}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_model_that_a_sweep_cannot_have_is_refused_in_a_sentence(tmp_path: Path) -> None:
    raw = read_raw(scenario_path("adversarial-tiny"))
    with pytest.raises(ScenarioError, match="no/such/model"):
        run_cell(Cell((), 1, raw, "no/such/model", "key"), "x", tmp_path)


@pytest.mark.parametrize("name", ["broadcast", "churn"])
def test_real_processes_say_which_kind_they_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"only a swarm with a real model \(model\.path\) runs as real processes"):
        run_processes(load_scenario(name), name="x", seed=1, model_path="none", runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
