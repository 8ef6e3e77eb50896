"""Hands out prompts by the deterministic rule.

Takes `AskWork`, answers with `Assignment`; asks the ledger by `AskAccount`.

It keeps one counter per worker and nothing else: what a worker must answer follows from its address, the step and that
counter, so that a validator can compute the same without asking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refimpl.calls import Patience, call_patiently
from refimpl.identity import address_of
from refimpl.journal import Journal, silent
from refimpl.messages import Account, AskAccount, AskWork, Assignment, Message
from refimpl.testnet.problems import choose_problems
from refimpl.world import Refused, World


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """What is handed out, and how much of it."""

    ledger: str  # node name
    dataset_length: int  # problems
    batch: int  # problems per assignment
    assignments: int  # per worker; then it is told that it is done
    step: int = 0
    patience: Patience = Patience()


class Orchestrator:
    """It has no loop: `serve()` and it is there."""

    def __init__(self, world: World, config: OrchestratorConfig, journal: Journal = silent) -> None:
        self.world, self.config, self.journal = world, config, journal
        self.counters: dict[str, int] = {}

    def serve(self) -> None:
        self.world.serve({AskWork: self.assign})

    async def assign(self, source: str, message: AskWork) -> Message:
        key, config = message.public_key, self.config
        account: Account = await call_patiently(self.world, config.ledger, AskAccount(key), config.patience)
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
        return Assignment(config.step, counter, choice.problem_ids, choice.sampling_seed)
