"""Sweeps: settings reach the right fields, intervals are right, and a stopped sweep goes on where it was."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sim.scenario import ScenarioError, read_raw, scenario_path
from sim.sweep import cells_of, figure_of, interval, parse_setting, report, sweep, with_setting


def raw() -> dict[str, Any]:
    return read_raw(scenario_path("adversarial-tiny"))


def test_settings_are_read_as_numbers_truths_or_words() -> None:
    assert parse_setting("links.downlink_mbit_s=50,100.5,true,paper") == (
        "links.downlink_mbit_s", [50, 100.5, True, "paper"],
    )  # fmt: skip
    for bad in ("no-equals", "=1", "field="):
        with pytest.raises(ScenarioError, match="field.path=value"):
            parse_setting(bad)


def test_a_setting_changes_its_field_and_nothing_else() -> None:
    before = raw()
    changed = with_setting(before, "task.temperature", 0.3)
    assert changed["task"]["temperature"] == 0.3 and before == raw()
    everybody = with_setting(before, "links.downlink_mbit_s", 7)
    assert {group["downlink_mbit_s"] for group in everybody["nodes"]} == {7}
    one = with_setting(before, "nodes.honest.count", 9)
    assert [group.get("count") for group in one["nodes"] if group["name"] == "honest"] == [9]
    with pytest.raises(ScenarioError, match="no such group of nodes; there are ledger, "):
        with_setting(before, "nodes.nobody.count", 9)


def test_a_bad_value_is_refused_before_anything_runs() -> None:
    with pytest.raises(ScenarioError, match="temperature"):
        cells_of("adversarial-tiny", [("task.temperature", [0.5, -1])], 3)
    cells = cells_of("adversarial-tiny", [("task.temperature", [0.5, 0.7]), ("task.batch", [2, 4])], 3)
    assert len(cells) == 12 and len({cell.key for cell in cells}) == 4


def test_the_interval_is_students() -> None:
    """1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.3027, so ± 4.3027/√3 = 2.4841."""
    result = interval([1.0, 2.0, 3.0])
    assert (result.mean, result.count) == (2.0, 3)
    assert result.half_width == pytest.approx(2.48414, abs=1e-4)
    assert math.isnan(interval([5.0]).half_width) and str(interval([5.0])) == "5"


def test_two_values_are_compared_pair_by_pair_on_equal_seeds() -> None:
    """The two columns vary by 10 over seeds, their difference is 1 each time."""
    rows = [{"a": value, "seed": seed, "f": 10.0 * seed + value} for value in (0, 1) for seed in (1, 2, 3)]
    text = report([("a", [0, 1])], rows, ["f"])
    assert "a = 1 minus a" not in text and "a = 1 minus 0" in text
    assert "- f: 1 ± 0" in text


def test_a_figure_is_found_by_its_path_or_refused_by_name() -> None:
    summary = {"detection": {"rate": 0.5, "low_95": None}, "title": "t"}
    assert figure_of(summary, "detection.rate") == 0.5
    assert figure_of(summary, "detection.low_95") is None
    with pytest.raises(ScenarioError, match="the summary has no 'nothing'"):
        figure_of(summary, "nothing.there")
    with pytest.raises(ScenarioError, match="is str"):
        figure_of(summary, "title")


def test_a_sweep_leaves_a_table_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [("verifier.thresholds", ["paper", "deployed"])]

    def again() -> tuple[Path, bool]:
        return sweep("adversarial-tiny", settings, seeds=1, runs=tmp_path, jobs=1)

    folder, kept = again()
    assert kept and {path.name for path in folder.iterdir()} == {"runs.csv", "table.md", "sweep.png"}
    with (folder / "runs.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["verifier.thresholds"] for row in rows] == ["paper", "deployed"]
    assert float(rows[0]["detection.rate"]) >= float(rows[1]["detection.rate"])
    table = (folder / "table.md").read_text(encoding="utf-8")

    ran: list[str] = []

    def once_more(*arguments: Any, **options: Any) -> Any:
        ran.append(options["name"])
        path = tmp_path / f"{options['name']}-{options['seed']}" / "summary.json"
        figures = json.loads(path.read_text(encoding="utf-8"))
        return SimpleNamespace(figures=figures)

    monkeypatch.setattr("sim.run.run_scenario", once_more)
    assert again() == (folder, True) and ran == []
    assert (folder / "table.md").read_text(encoding="utf-8") == table

    summaries = sorted(tmp_path.glob("adversarial-tiny-*/summary.json"))
    good = json.loads(summaries[0].read_text(encoding="utf-8"))
    for spoiled in ({**good, "ended": "stuck: a waits for b"}, {**good, "checks": [{"violations": ["broken"]}]}, {}):
        summaries[0].write_text(json.dumps(spoiled), encoding="utf-8")
        ran.clear()
        if spoiled:
            assert again() == (folder, False), "what was run before and went wrong is run again, and is in no mean"
            assert "1 of 2 runs did not keep their promises" in (folder / "table.md").read_text(encoding="utf-8")
        else:
            with pytest.raises(ScenarioError):  # the stand-in of a run gives back what is there: nothing
                again()
        assert [f"{name}-1" for name in ran] == [summaries[0].parent.name]


def test_runs_of_another_model_are_other_runs() -> None:
    mine, other = (cells_of("adversarial-tiny", [], 1, model)[0] for model in (None, "models/other"))
    assert mine.key != other.key and other.model == "models/other"


def test_without_dask_the_option_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask.distributed", None)
    with pytest.raises(ScenarioError, match=r"--dask needs the package distributed: pip install 'armillary\[dask\]'"):
        sweep("adversarial-tiny", [], seeds=1, runs=tmp_path, dask="tcp://127.0.0.1:1")


@pytest.mark.peer
@pytest.mark.slow
def test_a_sweep_on_dask_workers_leaves_what_one_on_cores_does(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="needs the extra dask: pip install 'armillary[dask]'")
    settings = [("verifier.thresholds", ["paper", "deployed"])]
    local, _ = sweep("adversarial-tiny", settings, seeds=1, runs=tmp_path / "cores", jobs=1)
    # two workers: with one, joblib computes here
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        there, kept = sweep("adversarial-tiny", settings, seeds=1, runs=tmp_path / "dask", dask=address)
        with distributed.Client(address) as client:
            done = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
    assert kept and done > 0, "the scheduler was given nothing to do"
    for name in ("runs.csv", "table.md"):
        assert (there / name).read_bytes() == (local / name).read_bytes()
