"""Hands out prompts by the deterministic rule.

Takes `AskWork`, answers with `Assignment` or `Later`; asks the ledger by `AskAccount`. Takes `Heartbeat`, and keeps a
table of who is alive (`liveness.py`).

It keeps one counter per worker and nothing else: what a worker must answer follows from its address, the step and that
counter, so that a validator can compute the same without asking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refimpl.identity import address_of, verify
from refimpl.journal import Journal, silent
from refimpl.messages import Account, AskAccount, AskWork, Assignment, Heartbeat, Later, Message, Ok, question_bytes
from refimpl.testnet.liveness import Change, LivenessConfig, NodeTable
from refimpl.testnet.problems import choose_problems
from refimpl.world import Refused, Timeout, Unreachable, World

QUESTION = "question"  # signature domain


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """What is handed out, and how much of it."""

    ledger: str  # node name
    dataset_length: int  # problems
    batch: int  # problems per assignment
    assignments: int  # per worker; then it is told that it is done
    step: int = 0
    ledger_timeout_s: float = 30.0
    later_s: float = 15.0  # after which a worker asks again when the ledger could not be asked
    liveness: LivenessConfig = LivenessConfig()
    status_pass_s: float = 15.0  # how often the table of nodes is looked at


class Orchestrator:
    """`serve()`, then `run()` until `stop()`."""

    def __init__(self, world: World, config: OrchestratorConfig, journal: Journal = silent) -> None:
        self.world, self.config, self.journal = world, config, journal
        self.counters: dict[str, int] = {}
        self.answered: dict[str, tuple[int, Assignment]] = {}  # public key -> its last question and the answer
        self.table = NodeTable(config.liveness)
        self.names: dict[str, str] = {}  # public key -> the name it last called under, for the journal
        self._stopped = world.signal()

    def serve(self) -> None:
        self.world.serve({AskWork: self.assign, Heartbeat: self.beat})

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        """Look at the table of nodes every `status_pass_s`."""
        while not await self._stopped.wait(self.config.status_pass_s):
            for change in self.table.status_pass(self.world.now()):
                self._note(change)

    async def beat(self, source: str, message: Heartbeat) -> Message:
        if message.public_key not in self.counters:  # asked for work at least once, hence has an account
            raise Refused("nobody of that key works here")
        self.names[message.public_key] = source
        change = self.table.beat(message.public_key, self.world.now())
        if change is not None:
            self._note(change)
        return Ok()

    def _note(self, change: Change) -> None:
        self.journal("node_state", worker=self.names[change.node], before=change.before, after=change.after)

    async def assign(self, source: str, message: AskWork) -> Message:
        key, config = message.public_key, self.config
        if not verify(key, question_bytes(message), message.signature, domain=QUESTION):
            raise Refused("the question is not signed by the key that it names")
        number, answer = self.answered.get(key, (-1, None))
        if message.number == number and answer is not None:
            return answer  # the reply was lost: the same question gets the same answer
        if message.number <= number:
            raise Refused(f"question {message.number} is older than question {number}, which was answered")
        try:
            account: Account = await self.world.call(config.ledger, AskAccount(key), config.ledger_timeout_s)
        except (Timeout, Unreachable) as error:
            return Later(config.later_s, f"the ledger did not answer: {error.reason}")
        if account.ejected:
            raise Refused("this account was ejected")
        counter = self.counters.get(key, 0) + 1
        if counter > config.assignments:
            return Assignment(config.step, counter, np.zeros(0, np.int64), 0, done=True)
        self.counters[key] = counter
        choice = choose_problems(
            address_of(key),
            step=config.step,
            counter=counter,
            dataset_length=config.dataset_length,
            count=config.batch,
        )
        self.journal("assigned", worker=source, step=config.step, counter=counter)
        assignment = Assignment(config.step, counter, choice.problem_ids, choice.sampling_seed)
        self.answered[key] = (message.number, assignment)
        return assignment
