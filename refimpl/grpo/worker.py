"""The worker: asks for a slot, waits for weights that the slot allows, generates a unit, hands it in, asks again.

It does not wait for the verdict: the next unit is generated while the last one is judged. Which weights: exactly
checkpoint max(0, s - k) for folder s, as the original's rule has it, although a newer one may be there already; so what
a slot brings does not depend on when it was worked at. Only where that one was never received (a newer one overtook it
on the way) or the validator does not hold it, the next newer one serves, and the journal says so.

Differs from the original (prime-rl, April 2025): 1) which weights will do is looked at again whenever some arrive;
there, a worker that waited for one version waited for ever once that was skipped; 2) `newest=True` takes the newest
weights that the slot allows: fresher data, but another run each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from refimpl.calls import Patience, call_patiently
from refimpl.grpo.messages import (
    OFFER,
    SLOT,
    AskSlot,
    Judgement,
    Offer,
    RunOver,
    SlotGiven,
    offer_content,
    question_content,
)
from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import Blob, Later, Message
from refimpl.work import Work
from refimpl.world import CallError, Signal, World


class Made(Protocol):
    """A unit, ready to be handed in."""

    @property
    def key(self) -> str: ...

    @property
    def file(self) -> Blob: ...

    @property
    def tokens(self) -> int: ...


class Maker(Protocol):
    """What a worker generates with: `refimpl.training` makes it of an engine and a task."""

    def make(self, slot: SlotGiven, public_key: str, version: int) -> Made:
        """The unit of this slot, by weights `version`."""
        ...

    def work(self, made: Any) -> Work:
        """What that cost."""
        ...


class Weights(Protocol):
    """The weights that have arrived at this node."""

    def held(self) -> list[int]:
        """Versions, ascending."""
        ...

    def arrived(self) -> Signal:
        """Set when the next version arrives."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    trainer: str  # node name
    validator: str  # node name
    newest: bool = False
    in_flight: int = 2  # units that are being judged while the next is generated
    slot_patience_s: float = 20.0
    patience: Patience = Patience()
    patience_for_verdict: Patience = Patience(timeout_s=600.0)


def usable(held: list[int], slot: SlotGiven, *, newest: bool) -> int | None:
    """The version to generate this slot with; None: none is here yet."""
    allowed = [version for version in held if slot.checkpoint <= version <= slot.folder]
    if not allowed:
        return None
    return max(allowed) if newest else min(allowed)


class Worker:
    """`run()` ends when the run is over, the trainer wants nothing more of this worker, or `stop()` was called."""

    def __init__(
        self,
        world: World,
        config: WorkerConfig,
        identity: Identity,
        maker: Maker,
        weights: Weights,
        journal: Journal = silent,
    ) -> None:
        self.world, self.config, self.identity = world, config, identity
        self.maker, self.weights, self.journal = maker, weights, journal
        self.judgements: list[Judgement] = []
        self._number = -1
        self._useless: set[int] = set()  # versions that the validator does not hold
        self._working: set[int] = set()  # slots whose unit is being judged
        self._landed = world.signal()
        self._stopped = world.signal()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        while not self._stopped.is_set():
            reply = await self._reach(self._question)
            if isinstance(reply, RunOver):
                self.journal("over", reason=reply.reason)
                break
            if isinstance(reply, Later):
                await self._stopped.wait(reply.wait_s)
            elif isinstance(reply, SlotGiven):
                await self._do(reply)
        self._stopped.set()

    def _question(self) -> AskSlot:
        """A new question; its number is the time, which rises over restarts too."""
        self._number = max(self._number + 1, round(self.world.now() * 1e9))
        working = tuple(sorted(self._working))
        question = AskSlot(self.identity.public_key, self._number, working, self.config.slot_patience_s)
        return dataclasses.replace(question, signature=self.identity.sign(question_content(question), domain=SLOT))

    async def _reach(self, ask: Callable[[], Message]) -> Any:
        """The trainer's answer, however long it is away. Whom it wants no more it tells so by RunOver."""
        while not self._stopped.is_set():
            try:
                return await call_patiently(self.world, self.config.trainer, ask(), self.config.patience)
            except CallError as error:  # a refusal too: a trainer that has just started serves nothing yet
                self.journal("cut_off", target=self.config.trainer, reason=error.reason)
                await self._stopped.wait(self.config.patience.wait_s_max)
        return None

    async def _do(self, slot: SlotGiven) -> None:
        version = await self._version_for(slot)
        if version is None:
            return
        key = self.identity.public_key
        made = await self.world.compute(self.maker.work, lambda: self.maker.make(slot, key, version))
        self.journal(
            "generated", slot=slot.index, folder=slot.folder, place=slot.place, version=version, tokens=made.tokens
        )
        unsigned = Offer(key, slot, made.key, made.file)
        offer = dataclasses.replace(unsigned, signature=self.identity.sign(offer_content(unsigned), domain=OFFER))
        while len(self._working) >= self.config.in_flight:
            await self._landed.wait()
            self._landed = self.world.signal()
        self._working.add(slot.index)
        self.world.spawn(self._hand_in(offer, version), "hand in")

    async def _version_for(self, slot: SlotGiven) -> int | None:
        while not self._stopped.is_set():
            arrived = self.weights.arrived()
            held = [version for version in self.weights.held() if version not in self._useless]
            version = usable(held, slot, newest=self.config.newest)
            if version is not None:
                if version != slot.checkpoint and not self.config.newest:
                    self.journal("version_skipped", wanted=slot.checkpoint, used=version)
                return version
            if held and min(held) > slot.folder:
                self.journal("too_late", slot=slot.index, folder=slot.folder)  # others have done it by now
                return None
            await arrived.wait(1.0)
        return None

    async def _hand_in(self, offer: Offer, version: int) -> None:
        try:
            judgement = await call_patiently(self.world, self.config.validator, offer, self.config.patience_for_verdict)
        except CallError as error:
            judgement = Judgement("unjudged", error.reason, decided=False)
        if judgement.code == "no_weights":
            self._useless.add(version)
        self.journal("judgement", slot=offer.slot.index, key=offer.key, code=judgement.code, reason=judgement.reason)
        self.judgements.append(judgement)
        self._working.discard(offer.slot.index)
        self._landed.set()
