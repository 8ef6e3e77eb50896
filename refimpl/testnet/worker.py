"""The worker: asks for prompts, generates, submits, and waits for the verdicts before it asks again.

Takes nothing; sends `Register`, `AskWork` and `Heartbeat`, and one `Submission` per answer. It is the same code for the
honest and for cheats: dishonesty is an engine (`refimpl/attacks`), handed in where an honest one would be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from refimpl.calls import Patience, call_patiently
from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import (
    AskWork,
    Assignment,
    Heartbeat,
    Later,
    Message,
    Register,
    Submission,
    Verdict,
    question_bytes,
    submission_bytes,
)
from refimpl.testnet.orchestrator import QUESTION
from refimpl.testnet.registry import REGISTRATION, registration_bytes
from refimpl.work import Work
from refimpl.world import CallError, Refused, Timeout, Unreachable, World

SUBMISSION = "submission"  # signature domain


class Answer(Protocol):
    """What an engine returns per prompt."""

    tokens: Any  # int32 [n]
    logprobs: Any  # float32 [n]
    proofs: tuple[bytes, ...]


class Generator(Protocol):
    """What a worker needs of its engine."""

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Any]:
        """Completions of `prompts`, sampled with `seeds`, each with `tokens`, `logprobs` and `proofs`."""
        ...

    def work(self, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> Work:
        """What that cost."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Whom a worker talks to, and how patient it is."""

    orchestrator: str  # node name
    validator: str  # node name
    ledger: str  # node name
    checkpoint: str  # content hash of the weights it claims to use
    stake: float = 1000.0
    pause_s: float = 0.0  # mean of an exponential rest between assignments: idle hardware is not idle all day
    heartbeat_s: float = 10.0  # between heartbeats
    heartbeat_timeout_s: float = 30.0
    patience: Patience = Patience()
    patience_for_verdict: Patience = Patience(timeout_s=3600.0)  # it may queue behind many others


class Worker:
    """One worker. `run()` ends when it has done all its assignments, was ejected, or `stop()` was called."""

    def __init__(
        self,
        world: World,
        config: WorkerConfig,
        identity: Identity,
        engine: Generator,
        prompt_of: Callable[[int], Sequence[int]],
        journal: Journal = silent,
    ) -> None:
        self.world, self.config, self.identity, self.engine = world, config, identity, engine
        self.prompt_of, self.journal = prompt_of, journal
        self.verdicts: list[Verdict] = []
        self.tasks_done = 0
        self._beating = False
        self._number = -1  # of the last question
        self._stopped = world.signal()

    def stop(self) -> None:
        """Stop after what is under way."""
        self._stopped.set()

    async def run(self) -> None:
        key, config = self.identity.public_key, self.config
        signature = self.identity.sign(registration_bytes(key, config.stake), domain=REGISTRATION)
        try:
            await self._reach(config.ledger, Register(key, config.stake, signature))
            while not self._stopped.is_set():
                reply = await self._reach(config.orchestrator, self._question())
                if self._beating is False:
                    self._beating = True
                    self.world.spawn(self._beat(), "heartbeat")
                if isinstance(reply, Later):
                    await self._stopped.wait(reply.wait_s)
                elif reply is None or reply.done:
                    break
                else:
                    await self._do(reply)
                    self.tasks_done += 1
                    if config.pause_s:
                        await self._stopped.wait(float(self.world.rng.exponential(config.pause_s)))
        except Refused as refusal:
            self.journal("dismissed", reason=refusal.reason)
        finally:
            self._stopped.set()

    def _question(self) -> AskWork:
        """A new question; its number is the time, which rises over restarts too."""
        self._number = max(self._number + 1, round(self.world.now() * 1e9))
        question = AskWork(self.identity.public_key, self._number)
        return dataclasses.replace(question, signature=self.identity.sign(question_bytes(question), domain=QUESTION))

    async def _reach(self, target: str, message: Message) -> Any:
        """Call until somebody answers, however long it is cut off; None when stopped first. Raises Refused."""
        while not self._stopped.is_set():
            try:
                return await call_patiently(self.world, target, message, self.config.patience)
            except (Timeout, Unreachable) as error:
                self.journal("cut_off", target=target, message=type(message).__name__, reason=error.reason)
                await self._stopped.wait(self.config.patience.wait_s_max)
        return None

    async def _beat(self) -> None:
        """Say that this node is alive, for as long as it works. A beat that is lost is lost."""
        config, beat = self.config, Heartbeat(self.identity.public_key, self.tasks_done)
        while not self._stopped.is_set():
            if beat.tasks_done != self.tasks_done:
                beat = Heartbeat(beat.public_key, self.tasks_done)
            try:  # noqa: SIM105 - most of what a run of thousands of nodes does is this line
                await self.world.call(config.orchestrator, beat, config.heartbeat_timeout_s)
            except CallError:
                pass
            await self._stopped.wait(config.heartbeat_s)

    async def _do(self, assignment: Assignment) -> None:
        prompts = [self.prompt_of(int(problem)) for problem in assignment.problem_ids]
        seeds = [assignment.sampling_seed + i for i in range(len(prompts))]
        answers = await self.world.compute(
            lambda done: self.engine.work(prompts, done), lambda: self.engine.answer(prompts, seeds)
        )
        tokens = sum(len(answer.tokens) for answer in answers)
        self.journal("generated", counter=assignment.counter, answers=len(answers), tokens=tokens)
        await self.world.gather(*(self._submit(assignment, i, answer) for i, answer in enumerate(answers)))

    async def _submit(self, assignment: Assignment, index: int, answer: Any) -> None:
        unsigned = Submission(
            public_key=self.identity.public_key,
            step=assignment.step,
            counter=assignment.counter,
            index=index,
            problem_id=int(assignment.problem_ids[index]),
            checkpoint=self.config.checkpoint,
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            proofs=tuple(answer.proofs),
        )
        signature = self.identity.sign(submission_bytes(unsigned), domain=SUBMISSION)
        submission = dataclasses.replace(unsigned, signature=signature)
        try:
            verdict = await call_patiently(
                self.world, self.config.validator, submission, self.config.patience_for_verdict
            )
        except CallError as error:
            self.journal("unjudged", counter=assignment.counter, index=index, reason=error.reason)
            return
        self.verdicts.append(verdict)
