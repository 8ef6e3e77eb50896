"""Why: checkers judge a run from outside; this gathers, as it runs, the little that they need to remember of it.

Facts come from two sides that do not depend on each other: the run's events, and the messages on the wire (through the
watch's taps). Both work during a run as at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from refimpl.identity import address_of
from refimpl.messages import AskWork, Assignment, Submission, Verdict
from refimpl.testnet.problems import choose_problems
from sim.watch import OpenCall, Watch


@dataclass
class Judged:
    """What was said of one submission."""

    public_key: str
    accepted: bool
    tokens: int
    life: int  # of the validator, by which it was judged last


@dataclass
class Facts:
    """What has happened so far. Tell it of events by `event`, and of messages by `tap`."""

    workers: Collection[str] = ()
    services: Collection[str] = ()
    validator: str = "validator"
    dataset_length: int = 0  # problems; 0: not known, the rule of problems is not checked
    batch: int = 0  # problems per assignment

    last_ns: int = 0
    back: list[str] = field(default_factory=list)  # where the clock of the log went back
    key_of: dict[str, str] = field(default_factory=dict)  # worker -> public key
    worker_of: dict[str, str] = field(default_factory=dict)
    stakes: dict[str, float] = field(default_factory=dict)  # public key -> stake put down
    judged: dict[str, Judged] = field(default_factory=dict)  # by submission
    judged_again: list[str] = field(default_factory=list)
    slashed: Counter[str] = field(default_factory=Counter)  # public key -> times
    ejected_ns: dict[str, int] = field(default_factory=dict)  # by public key
    forfeited: dict[str, float] = field(default_factory=dict)  # public key -> what it lost when ejected
    assigned_late: dict[str, list[int]] = field(default_factory=dict)  # key -> assignments after its ejection
    off_rule: list[str] = field(default_factory=list)  # assignments and verdicts beside the deterministic rule
    progress_ns: dict[str, int] = field(default_factory=dict)  # worker -> when it last got on
    struck: Counter[str] = field(default_factory=Counter)  # faults in force, by node ("" for everybody)
    calm_ns: int = 0  # when the last fault, or change of a service, was
    _life: int = 0

    # --------------------------------------------------------------------------------------------------- events
    def event(self, event: Mapping[str, Any]) -> None:
        """One line of the log."""
        now_ns, kind, node = event["t_ns"], event["kind"], event["node"]
        if now_ns < self.last_ns:
            self.back.append(f"{kind} of {node} at {now_ns} ns comes after an event at {self.last_ns} ns")
        self.last_ns = max(now_ns, self.last_ns)
        worker = event.get("worker", node)
        if worker in self.workers:
            self.progress_ns[worker] = max(self.progress_ns.get(worker, 0), event.get("end_ns", now_ns))
        take = TAKERS.get(kind)
        if take is not None:
            take(self, event)

    def _registered(self, event: Mapping[str, Any]) -> None:
        key = event["public_key"]
        self.key_of[event["worker"]], self.worker_of[key] = key, event["worker"]
        self.stakes[key] = event["stake"]

    def _assigned(self, event: Mapping[str, Any]) -> None:
        key = self.key_of.get(event["worker"])
        if key is not None and key in self.ejected_ns:
            self.assigned_late.setdefault(key, []).append(event["t_ns"])

    def _judge(self, event: Mapping[str, Any]) -> None:
        submission, key = event["submission"], event["public_key"]
        before = self.judged.get(submission)
        if before is not None and before.life == self._life:
            self.judged_again.append(submission)
        accepted = bool(event["decided"] and event["accepted"])
        self.judged[submission] = Judged(key, accepted, event["tokens"], self._life)
        worker = self.worker_of.get(key)
        if worker is not None:
            self.progress_ns[worker] = max(self.progress_ns.get(worker, 0), event["t_ns"])

    def _slashed(self, event: Mapping[str, Any]) -> None:
        self.slashed[event["public_key"]] += 1

    def _ejected(self, event: Mapping[str, Any]) -> None:
        self.ejected_ns.setdefault(event["public_key"], event["t_ns"])
        self.forfeited[event["public_key"]] = event["forfeited"]

    def _fault(self, event: Mapping[str, Any]) -> None:
        shared = event["fault"] == "partition" or event.get("of", "nodes") != "nodes"  # not on single nodes
        everybody = shared or any(name in self.services for name in event["on"])
        for name in [""] if everybody else event["on"]:
            self.struck[name] += 1 if event["begins"] else -1
        self.calm_ns = event["t_ns"]

    def _up_or_down(self, event: Mapping[str, Any]) -> None:
        if event["node"] in self.services:
            self.calm_ns = event["t_ns"]
        if event["node"] == self.validator and event["kind"] == "down":
            self._life += 1

    # ------------------------------------------------------------------------------------------------- messages
    def tap(self, watch: Watch) -> None:
        """Listen to the wire."""
        watch.tap(AskWork, self._see_assignment)
        watch.tap(Submission, self._see_verdict)

    def _rule(self, public_key: str, step: int, counter: int) -> Any:
        return choose_problems(
            address_of(public_key), step=step, counter=counter, dataset_length=self.dataset_length, count=self.batch
        )

    def _see_assignment(self, call: OpenCall, answer: Any) -> None:
        message = call.message
        if not isinstance(answer, Assignment) or not isinstance(message, AskWork) or answer.done:
            return
        if self.dataset_length:
            rule = self._rule(message.public_key, answer.step, answer.counter)
            if list(rule.problem_ids) != list(answer.problem_ids) or rule.sampling_seed != answer.sampling_seed:
                self.off_rule.append(
                    f"{call.caller.name} was given problems {list(map(int, answer.problem_ids))} as assignment "
                    f"{answer.counter} of step {answer.step}; the rule gives {list(map(int, rule.problem_ids))}"
                )

    def _see_verdict(self, call: OpenCall, answer: Any) -> None:
        sent = call.message
        if not isinstance(answer, Verdict) or not isinstance(sent, Submission) or not answer.accepted:
            return
        if self.dataset_length:
            problems = self._rule(sent.public_key, sent.step, sent.counter).problem_ids
            if not 0 <= sent.index < len(problems) or problems[sent.index] != sent.problem_id:
                self.off_rule.append(
                    f"{call.caller.name} was paid for problem {sent.problem_id} at index {sent.index} of assignment "
                    f"{sent.counter}; the rule gives {list(map(int, problems))}"
                )


TAKERS = {
    "registered": Facts._registered,
    "assigned": Facts._assigned,
    "judged": Facts._judge,
    "slashed": Facts._slashed,
    "ejected": Facts._ejected,
    "fault": Facts._fault,
    "up": Facts._up_or_down,
    "down": Facts._up_or_down,
}
