"""`make sim SCENARIO=intellect2`: the roles of `make train` at a size that fits nowhere, held to their promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refimpl.grpo.rollout import RolloutError
from refimpl.grpo.staleness import Trained
from refimpl.messages import Blob
from refimpl.training.prices import decode_work, generate_work
from refimpl.work import Forward, Prove
from sim.hardware import find_device
from sim.kinds.training import Training
from sim.kinds.training_checks import (
    TrainingFacts,
    no_version_is_left_out,
    none_is_lost_after_acceptance,
    none_is_too_old,
    none_is_trained_twice,
    none_is_trained_unverified,
)
from sim.kinds.training_standin import Note
from sim.model_sizes import MODEL_SIZES
from sim.run import RunResult, run_scenario
from sim.scenario import Scenario, ScenarioError, check_raw, read_raw, scenario_path

QWQ = MODEL_SIZES["QwQ-32B"]


def tiny(change: Callable[[dict[str, Any]], None] = lambda raw: None) -> Scenario:
    """The shipped scenario with two workers, three units of 16 answers a version, and 32 shards."""
    raw = read_raw(scenario_path("intellect2"))
    keep = ("trainer", "validator", "relay-virginia", "h100-oregon", "rtx4090-tokyo")
    raw["nodes"] = [group for group in raw["nodes"] if group["name"] in keep]
    raw["training"] |= {"units_per_step": 3, "problems_per_unit": 2, "group": 8, "steps": 4}
    raw["training"] |= {"shard_mb": 1000.0, "connections": 4, "checkpoint_gb": 32.0}
    change(raw)
    return check_raw(raw, "tiny.toml")


def played(runs: Path, scenario: Scenario, seed: int = 1) -> RunResult:
    return run_scenario(
        scenario, name="tiny", seed=seed, model_path="", runs=runs, say=lambda text: None, progress=False
    )


def crash(node: str, start_s: float, end_s: float) -> Callable[[dict[str, Any]], None]:
    """That fault, on that node."""

    def change(raw: dict[str, Any]) -> None:
        fault = {"kind": "crash", "nodes": [node], "start_s": start_s, "end_s": end_s}
        raw["faults"] = [*raw.get("faults", []), fault]

    return change


def test_the_same_seed_writes_the_same_log_and_another_one_does_not(tmp_path: Path) -> None:
    """ "Same seed, same log", with everything going well and every promise kept."""
    logs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = played(tmp_path / name, tiny(), seed)
        assert result.ok, (result.ended, result.violations)
        logs.append((result.folder / "events.jsonl").read_bytes())
    assert logs[0] == logs[1] != logs[2]
    figures = json.loads((tmp_path / "a" / "tiny-1" / "summary.json").read_text())
    assert figures["versions"] == 4 and figures["age_max"] <= 2
    best_min = 32e9 * 8 / 590e6 / 60  # with shards of a gigabyte, four at once, the last of them have a line each
    assert best_min <= figures["broadcast_min"] < 1.1 * best_min
    assert (tmp_path / "a" / "tiny-1" / "timeline.png").stat().st_size > 1000


def test_a_cheat_is_denied_and_gets_no_more_slots(tmp_path: Path) -> None:
    def cheat(raw: dict[str, Any]) -> None:
        raw["nodes"][-1]["behaviour"] = "other-checkpoint"

    result = played(tmp_path, tiny(cheat))
    assert result.ok, (result.ended, result.violations)
    assert result.figures["denied"] >= 1 and result.figures["banned"] == ["rtx4090-tokyo"]
    assert result.figures["versions"] == 4


@pytest.mark.parametrize("node", ["trainer", "validator", "relay-virginia", "h100-oregon"])
def test_a_crash_of_anybody_costs_time_and_no_promise(node: str, tmp_path: Path) -> None:
    result = played(tmp_path, tiny(crash(node, 700.0, 900.0)))
    assert not result.violations, result.violations
    assert result.figures["versions"] == 4


def view(events: list[dict[str, Any]], trained: list[Trained], max_age: int = 2) -> Any:
    """What checkers see of a run with this log, and with this on the trainer's disk."""
    facts = TrainingFacts()
    for event in events:
        facts.event({"t_ns": 0, "node": "w", **event})
    return SimpleNamespace(facts=facts, trained=lambda: trained, max_age=max_age, steps=9, over=True, all_done=True)


def story(folder: int, version: int, slot: int = 0, key: str = "f") -> list[dict[str, Any]]:
    """A file, from its slot to its acceptance."""
    return [
        {"kind": "slot", "slot": slot, "folder": folder, "to": "w"},
        {"kind": "generated", "slot": slot, "folder": folder, "version": version},
        {"kind": "judged", "key": key, "slot": slot, "accepted": True},
        {"kind": "taken", "key": key, "folder": folder, "verdict": "accepted"},
    ]


def test_checkers_see_what_is_too_old_whatever_the_books_say() -> None:
    """The books say that version 1 made the file; its worker had said 0."""
    assert list(none_is_too_old(view(story(3, 0), [Trained(version=3, key="f", oldest_version=1)])))
    assert not list(none_is_too_old(view(story(3, 1), [Trained(version=3, key="f", oldest_version=1)])))


def test_checkers_see_what_is_trained_twice_or_lost_or_unverified() -> None:
    one = Trained(version=0, key="f", oldest_version=0)
    again = Trained(version=1, key="f", oldest_version=0)
    assert list(none_is_trained_twice(view(story(0, 0), [one, again])))
    assert not list(none_is_trained_twice(view(story(0, 0), [one])))
    other = Trained(version=0, key="g", oldest_version=0)
    assert list(none_is_lost_after_acceptance(view(story(0, 0), [other])))
    assert not list(none_is_lost_after_acceptance(view(story(0, 0), [one])))
    assert list(none_is_trained_unverified(view(story(0, 0), [other])))
    assert not list(none_is_trained_unverified(view(story(0, 0), [one])))


def test_checkers_see_a_version_that_is_left_out_without_a_word() -> None:
    made = [Trained(version=v, key=str(v), oldest_version=v) for v in range(3)]
    assert not list(no_version_is_left_out(view([], made)))
    assert list(no_version_is_left_out(view([], [made[0], made[2]])))
    assert list(no_version_is_left_out(view([], made[1:]))), "the first"
    out = [{"kind": "out", "checkpoint": checkpoint} for checkpoint in (0, 2)]
    assert list(no_version_is_left_out(view(out, [])))
    assert list(no_version_is_left_out(view(story(3, 2), [])))  # the rule names version 1
    word = {"kind": "version_skipped", "wanted": 1, "used": 2}
    assert not list(no_version_is_left_out(view([word, *story(3, 2)], [])))


def test_a_file_that_is_changed_on_its_way_is_no_rollout_file() -> None:
    outfit = Training(tiny(), 1).outfit
    note = Note("honest", 0, 1, 0)
    file = note.file(outfit.rows(note))
    assert Note.of(file) == note and len(outfit.key_of(file)) == 64
    with pytest.raises(RolloutError, match="changed on its way"):
        Note.of(Blob(file.size_bytes, "corrupted|" + file.content_id))


def test_decode_steps_are_counted_answer_by_answer() -> None:
    """With room for two: 5 and 3 tokens begin, 4 follows where the 3 end. One step each after the first token."""
    stretches = decode_work(QWQ, 10, [5, 3, 4], slots=2)
    assert [(s.batch, s.steps) for s in stretches] == [(2, 2), (2, 2), (1, 1)]
    assert sum(s.batch * s.steps for s in stretches) == 4 + 2 + 3
    assert [s.past_tokens for s in stretches] == [11, 12, 13]
    together = generate_work(QWQ, 10, [5, 3, 4])
    assert [(p.batch, p.steps) for p in together.parts if isinstance(p, Forward)] == [(3, 1), (3, 2), (2, 1), (1, 1)]
    assert [p.tokens for p in together.parts if isinstance(p, Prove)] == [12]
    device = find_device("8x H200 SXM")
    assert device.price(together) < device.price(generate_work(QWQ, 10, [5, 3, 4], at_once=1))


def test_a_device_that_is_too_small_is_refused_before_anything_runs() -> None:
    def small(raw: dict[str, Any]) -> None:
        raw["nodes"][-1]["device"] = "RTX 4090"

    with pytest.raises(ScenarioError, match="rtx4090-tokyo needs .* GB"):
        Training(tiny(small), 1)


def test_an_unknown_published_figure_lists_the_known_ones() -> None:
    def wrong(raw: dict[str, Any]) -> None:
        raw["training"]["published"][0]["figure"] = "broadcast_h"

    with pytest.raises(ScenarioError, match="published figure is 'broadcast_h'; known: broadcast_min"):
        tiny(wrong)
