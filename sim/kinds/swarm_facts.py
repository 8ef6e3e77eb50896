"""Why: a swarm's checkers judge money and work; this gathers, as it runs, the little that they need to remember of it.

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
from sim.facts import Facts
from sim.watch import OpenCall, Watch


@dataclass
class Judged:
    """What was said of one submission."""

    public_key: str
    accepted: bool
    tokens: int
    life: int  # of the validator, by which it was judged last


@dataclass
class SwarmFacts(Facts):
    """What has happened so far. Tell it of events by `event`, and of messages by `tap`."""

    workers: Collection[str] = ()
    validator: str = "validator"
    dataset_length: int = 0  # problems; 0: not known, the rule of problems is not checked
    batch: int = 0  # problems per assignment

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
    resting: set[str] = field(default_factory=set)  # workers whose last assignment is all judged
    _open: dict[str, set[tuple[int, int]]] = field(default_factory=dict)  # worker -> answers without a verdict
    _life: int = 0

    # --------------------------------------------------------------------------------------------------- events
    def event(self, event: Mapping[str, Any]) -> None:
        """One line of the log."""
        super().event(event)
        kind, node = event["kind"], event["node"]
        worker = event.get("worker", node)
        if worker in self.workers and kind != "node_state":  # what others think of it is no progress of its own
            self._got_on(worker, event.get("end_ns", event["t_ns"]))
        take = TAKERS.get(kind)
        if take is not None:
            take(self, event)

    def _got_on(self, worker: str, until_ns: int) -> None:
        self.progress_ns[worker] = max(self.progress_ns.get(worker, 0), until_ns)

    def _registered(self, event: Mapping[str, Any]) -> None:
        key = event["public_key"]
        self.key_of[event["worker"]], self.worker_of[key] = key, event["worker"]
        self.stakes[key] = event["stake"]

    def _assigned(self, event: Mapping[str, Any]) -> None:
        self.resting.discard(event["worker"])
        key = self.key_of.get(event["worker"])
        if key is not None and key in self.ejected_ns:
            self.assigned_late.setdefault(key, []).append(event["t_ns"])

    def _generated(self, event: Mapping[str, Any]) -> None:
        self._open[event["node"]] = {(event["counter"], index) for index in range(event["answers"])}

    def _ended(self, worker: str, counter: int, index: int) -> None:
        """An answer is judged, or was given up."""
        left = self._open.get(worker, set())
        left.discard((counter, index))
        if not left and self._open.pop(worker, None) is not None:
            self.resting.add(worker)

    def _unjudged(self, event: Mapping[str, Any]) -> None:
        self._ended(event["node"], event["counter"], event["index"])

    def _judge(self, event: Mapping[str, Any]) -> None:
        submission, key = event["submission"], event["public_key"]
        before = self.judged.get(submission)
        if before is not None and before.life == self._life:
            self.judged_again.append(submission)
        accepted = bool(event["decided"] and event["accepted"])
        self.judged[submission] = Judged(key, accepted, event["tokens"], self._life)
        worker = self.worker_of.get(key)
        if worker is not None:
            self._got_on(worker, event["t_ns"])
            self._ended(worker, event["counter"], event["index"])

    def _slashed(self, event: Mapping[str, Any]) -> None:
        self.slashed[event["public_key"]] += 1

    def _ejected(self, event: Mapping[str, Any]) -> None:
        self.ejected_ns.setdefault(event["public_key"], event["t_ns"])
        self.forfeited[event["public_key"]] = event["forfeited"]

    def _up_or_down(self, event: Mapping[str, Any]) -> None:
        super()._up_or_down(event)
        if event["node"] == self.validator and event["kind"] == "down":
            self._life += 1
        self.resting.discard(event["node"])  # what it was given is forgotten: it asks again
        self._open.pop(event["node"], None)

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
    "registered": SwarmFacts._registered,
    "assigned": SwarmFacts._assigned,
    "generated": SwarmFacts._generated,
    "unjudged": SwarmFacts._unjudged,
    "judged": SwarmFacts._judge,
    "slashed": SwarmFacts._slashed,
    "ejected": SwarmFacts._ejected,
}
