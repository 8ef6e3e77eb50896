"""Why: what rings promise: every answer comes and is right, the guilty are found, and an innocent never is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from refimpl.pipeline.requests import Kept, RequestLog
from sim.checkers import EVERY, SECOND_NS, Checkers, View
from sim.facts import Facts


@dataclass
class PipelineFacts(Facts):
    """What has happened so far, by the log."""

    speeds: dict[str, list[tuple[float, float]]] = field(
        default_factory=dict
    )  # ring -> each round's tokens/s and bound
    rounds: dict[str, int] = field(default_factory=dict)  # ring -> rounds answered
    refused: dict[str, str] = field(default_factory=dict)  # ring -> why its client got no answer
    accepted: dict[str, list[str]] = field(default_factory=dict)  # ring -> requests whose answers were accepted
    blamed: list[tuple[str, str]] = field(default_factory=list)  # (ring, node), by replay
    convicted: list[str] = field(default_factory=list)  # public keys, by complaint
    undecided: dict[str, list[str]] = field(default_factory=dict)  # ring -> what could not be judged
    batch: dict[str, int] = field(default_factory=dict)  # ring -> sequences that decode together

    def event(self, event: Mapping[str, Any]) -> None:
        """One line of the log."""
        super().event(event)
        kind = event["kind"]
        if kind == "planned":
            self.batch[event["ring"]] = event["micro_batches"] * event["rows"]
        elif kind == "answered":
            ring = event["ring"]
            self.rounds[ring] = self.rounds.get(ring, 0) + 1
            if event["cycle_s"] > 0:
                made = self.batch[ring] / event["cycle_s"]
                self.speeds.setdefault(ring, []).append((made, event["bound_tokens_per_s"]))
        elif kind == "unanswered":
            self.refused[event["ring"]] = event["reason"]
        elif kind == "checked":
            self._checked(event)
        elif kind == "verdict" and event["culprit"] is not None:
            self.convicted.append(event["culprit"])

    def _checked(self, event: Mapping[str, Any]) -> None:
        self.blamed += [(event["ring"], name) for name in event["blamed"]]
        if event["accepted"]:
            self.accepted.setdefault(event["ring"], []).append(event["request"])
        if not event["decided"]:
            self.undecided.setdefault(event["ring"], []).append(f"{event['request']}: {event['reason']}")


def something_was_answered(view: PipelineView) -> Iterator[str]:
    """By the end, at least one ring answered."""
    if view.over and not view.facts.rounds:
        yield f"nothing ever happened: no ring answered by {view.now_ns / SECOND_NS:.3f} s"


def every_ring_answers(view: PipelineView) -> Iterator[str]:
    """By the end, every ring has answered all that it was asked, unless its head was convicted or faults go on."""
    for ring in view.rings if view.over else ():
        done = view.facts.rounds.get(ring, 0)
        reason = view.facts.refused.get(ring, "no reason given")
        if done < view.rounds and "convicted" not in reason and not view.facts.struck:
            yield f"ring {ring} answered {done} of {view.rounds} rounds: {reason}"


def nobody_innocent_is_blamed(view: PipelineView) -> Iterator[str]:
    """Who is blamed, by a complaint or by replay, cheats."""
    keys = {key: name for name, key in view.keys().items()}
    for name in sorted({node for _, node in view.facts.blamed} | {keys[key] for key in view.facts.convicted}):
        if name not in view.guilty:
            yield f"{name} is blamed, and is honest"


def accepted_answers_are_right(view: PipelineView) -> Iterator[str]:
    """An accepted answer is, token for token, that of one honest process."""
    if not view.over:
        return
    for ring, requests in view.facts.accepted.items():
        for request in requests:
            kept = view.logs[ring].requests[request]
            if kept.answer != view.right(ring, kept):
                yield f"ring {ring}: the answer to {request} was accepted, and is wrong"


def no_ring_beats_its_bound(view: PipelineView) -> Iterator[str]:
    """No ring makes more tokens/s than its stages and links allow."""
    for ring, speeds in view.facts.speeds.items():
        for number, (made, bound) in enumerate(speeds):
            if made > bound * 1.05:  # passes early in an answer are a little cheaper
                yield f"ring {ring} made {made:.1f} tokens/s in round {number}; its bound is {bound:.1f}"


def verdicts_are_reached(view: PipelineView) -> Iterator[str]:
    """Without faults, every finished answer is accepted or somebody is blamed. In a ring with a conviction by complaint
    an answer may stay open: its last chunk was complained about after its last token had come."""
    keys, convicted = view.keys(), set(view.facts.convicted)
    for ring, sentences in view.facts.undecided.items():
        if view.over and not view.facts.struck and not any(keys[name] in convicted for name in view.rings[ring]):
            yield from (f"ring {ring}: no verdict on {sentence}" for sentence in sentences)


PIPELINE: Checkers = (
    ("liveness", something_was_answered),
    ("liveness", every_ring_answers),
    ("liveness", verdicts_are_reached),
    ("correctness", nobody_innocent_is_blamed),
    ("correctness", accepted_answers_are_right),
    ("correctness", no_ring_beats_its_bound),
)


@dataclass(frozen=True, kw_only=True)
class PipelineView(View):
    """What the checkers of rings see."""

    facts: PipelineFacts
    checkers: Checkers = EVERY + PIPELINE
    rings: Mapping[str, list[str]]  # ring -> its nodes, spares too
    guilty: set[str]  # nodes that cheat in a way that has a culprit
    rounds: int  # of questions to each ring
    keys: Callable[[], Mapping[str, str]]  # node -> public key
    logs: Mapping[str, RequestLog]  # ring -> its head's record
    right: Callable[[str, Kept], list[int]]  # the answer of one honest process
