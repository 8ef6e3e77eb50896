"""Why: what asynchronous training promises, whatever breaks: nothing too old is trained, nothing twice, nothing that
was acknowledged is lost, and no version is left out without a word.

What was trained is read from the trainer's disk, how it came about from the log: neither is the trainer's own books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refimpl.grpo.staleness import Trained, checkpoint_for, out_of_turn
from sim.checkers import EVERY, SECOND_NS, Checkers, View
from sim.facts import Facts


@dataclass
class TrainingFacts(Facts):
    """What has happened so far, by the log."""

    trainer: str = "trainer"
    made: dict[tuple[str, int], int] = field(default_factory=dict)  # (worker, slot) -> weights that it generated with
    keys: dict[str, int] = field(default_factory=dict)  # file -> its slot, as a validator judged it right
    slots: dict[int, str] = field(default_factory=dict)  # slot -> the worker that had it last
    accepted: dict[str, int] = field(default_factory=dict)  # file -> folder, once the trainer had said that it is safe
    out: list[int] = field(default_factory=list)  # checkpoints, in the order in which they were published
    versions: list[int] = field(default_factory=list)  # made by the trainer, in order
    said: set[tuple[str, int, int]] = field(default_factory=set)  # (worker, version wanted, version used)
    used: list[tuple[str, int, int]] = field(default_factory=list)  # (worker, folder, version) of all that was made
    finished: bool = False

    def event(self, event: Mapping[str, Any]) -> None:
        """One line of the log."""
        super().event(event)
        kind, node = event["kind"], event["node"]
        if kind == "slot":
            self.slots[event["slot"]] = event["to"]
        elif kind == "generated":
            self.made[node, event["slot"]] = event["version"]
            self.used.append((node, event["folder"], event["version"]))
        elif kind == "judged" and event["accepted"]:
            self.keys[event["key"]] = event["slot"]
        elif kind == "taken" and event["verdict"] == "accepted":
            self.accepted[event["key"]] = event["folder"]
        elif kind == "trained":
            self.versions.append(event["version"])
        elif kind == "out":
            self.out.append(event["checkpoint"])
        elif kind == "version_skipped":
            self.said.add((node, event["wanted"], event["used"]))
        elif kind == "finished":
            self.finished = True

    def generated_with(self, key: str) -> int | None:
        """The weights that made this file, as its worker said when it made it."""
        slot = self.keys.get(key)
        return None if slot is None else self.made.get((self.slots[slot], slot))


def something_was_trained(view: TrainingView) -> Iterator[str]:
    """By the end, at least one version was made."""
    if view.over and not view.facts.versions:
        yield f"nothing ever happened: no version was made by {view.now_ns / SECOND_NS:.3f} s"


def all_versions_are_made(view: TrainingView) -> Iterator[str]:
    """A run that says it is done has made all its versions."""
    if view.over and view.all_done and len(set(view.facts.versions)) < view.steps:
        yield f"{len(set(view.facts.versions))} of {view.steps} versions were made"


def none_is_too_old(view: TrainingView) -> Iterator[str]:
    """No answer is trained more than k versions after the weights that generated it."""
    for unit in view.trained():
        made_with = view.facts.generated_with(unit.key)
        if made_with is not None and not 0 <= unit.version - made_with <= view.max_age:
            yield (
                f"version {unit.version} trained {unit.key[:16]}, generated with weights {made_with}; "
                f"k is {view.max_age}"
            )


def none_is_trained_twice(view: TrainingView) -> Iterator[str]:
    """No file is trained in two versions, or twice in one."""
    seen: dict[str, int] = {}
    for unit in view.trained():
        if unit.key in seen:
            yield f"version {unit.version} trained {unit.key[:16]}, which version {seen[unit.key]} had trained"
        seen[unit.key] = unit.version


def none_is_trained_unverified(view: TrainingView) -> Iterator[str]:
    """What is trained was found right by the validator."""
    for unit in view.trained():
        if unit.key not in view.facts.keys:
            yield f"version {unit.version} trained {unit.key[:16]}, which no validator had found right"


def none_is_lost_after_acceptance(view: TrainingView) -> Iterator[str]:
    """A file that the trainer said it had taken is trained by the version of its folder."""
    if not view.over:
        return
    trained = {unit.key for unit in view.trained()}
    done = max((unit.version for unit in view.trained()), default=-1)
    for key, folder in view.facts.accepted.items():
        if folder <= done and key not in trained:
            yield f"{key[:16]} was accepted for version {folder}, and was not trained"


def no_version_is_left_out(view: TrainingView) -> Iterator[str]:
    """Versions are made and published one after another; who generates with other weights than the rule names has said
    so."""
    newest = -1
    for unit in view.trained():
        if wrong := out_of_turn(unit.version, newest):
            yield wrong
        newest = max(newest, unit.version)
    newest = -1
    for checkpoint in view.facts.out:
        if checkpoint > newest + 1:
            yield f"checkpoint {checkpoint} was published after checkpoint {newest}"
        newest = max(newest, checkpoint)
    for worker, folder, version in view.facts.used:
        wanted = checkpoint_for(folder, view.max_age)
        if version != wanted and (worker, wanted, version) not in view.facts.said:
            yield f"{worker} generated for folder {folder} with weights {version}, not {wanted}, and did not say so"


TRAINING: Checkers = (
    ("liveness", something_was_trained),
    ("liveness", all_versions_are_made),
    ("correctness", none_is_too_old),
    ("correctness", none_is_trained_twice),
    ("correctness", none_is_trained_unverified),
    ("correctness", none_is_lost_after_acceptance),
    ("correctness", no_version_is_left_out),
)


@dataclass(frozen=True, kw_only=True)
class TrainingView(View):
    """What the checkers of training see."""

    facts: TrainingFacts
    checkers: Checkers = EVERY + TRAINING
    steps: int
    max_age: int
    trained: Callable[[], Sequence[Trained]]  # what the trainer's disk says, in order
