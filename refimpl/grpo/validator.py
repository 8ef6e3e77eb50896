"""The validator of rollout files: checks each against its slot and a replay, and passes on what is right.

Takes `Offer`, answers with `Judgement`, tells the trainer by `Verified` or `Denied`. A file is judged once; the same
again gets the same answer. What passed is the validator's to deliver: it calls the trainer until that has the file on
its disk, and only then tells the worker. Checking the next file does not wait for that.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from refimpl.calls import Patience, call_patiently
from refimpl.grpo.messages import (
    OFFER,
    WORD,
    Denied,
    Judgement,
    Offer,
    Verified,
    offer_content,
    word_content,
)
from refimpl.grpo.rollout import RolloutError
from refimpl.grpo.unit import CODES
from refimpl.identity import Identity, verify
from refimpl.journal import Journal, silent
from refimpl.messages import Blob, Message
from refimpl.work import Seconds, Work
from refimpl.world import CallError, Signal, World


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check says of a file."""

    code: str  # "ok", or a word of `unit.CODES`
    reason: str
    decided: bool = True
    rows: int = 0
    tokens: int = 0


class Inspector(Protocol):
    """How a file is checked: `refimpl.training` makes it of an engine, proofs and a task's verifier."""

    def version_of(self, offer: Offer) -> int | None:
        """The weights that the file says it was made with; None when it cannot be read."""
        ...

    def inspect(self, offer: Offer) -> Finding: ...

    def work(self, finding: Any) -> Work: ...


class Weights(Protocol):
    def held(self) -> list[int]: ...

    def arrived(self) -> Signal: ...


@dataclass(frozen=True, kw_only=True)
class ValidatorConfig:
    trainer: str  # node name
    weights_wait_s: float = 30.0  # for weights that are still on their way
    remembered: int = 100_000  # judgements
    patience: Patience = Patience()


class Validator:
    """`serve()`, then `run()` until `stop()`. `key_of(file)`: the name that its content gives it (SHA-256)."""

    def __init__(
        self,
        world: World,
        config: ValidatorConfig,
        identity: Identity,
        inspector: Inspector,
        weights: Weights,
        journal: Journal = silent,
        *,
        key_of: Callable[[Blob], str],
    ) -> None:
        self.world, self.config, self.identity = world, config, identity
        self.inspector, self.weights, self.journal, self.key_of = inspector, weights, journal, key_of
        self._queue: deque[Offer] = deque()
        self._arrived = world.signal()
        self._judged: dict[tuple[int, str], Signal] = {}  # (slot, key) -> set when judged
        self._judgements: dict[tuple[int, str], Judgement] = {}
        self._stopped = False

    def serve(self) -> None:
        self.world.serve({Offer: self.offered})

    def stop(self) -> None:
        self._stopped = True
        self._arrived.set()

    async def offered(self, source: str, offer: Offer) -> Message:
        if not verify(offer.public_key, offer_content(offer), offer.signature, domain=OFFER):
            return Judgement("bad_signature", CODES["bad_signature"], decided=False)  # nobody is shown to have sent it
        name = (offer.slot.index, offer.key)
        if self._stopped and name not in self._judged:
            return Judgement("no_verdict", "this validator has stopped", decided=False)
        if name not in self._judged:
            self._judged[name] = self.world.signal()
            self._queue.append(offer)
            self._arrived.set()
        await self._judged[name].wait()
        judgement = self._judgements[name]
        if not judgement.decided:  # it may be tried again
            self._judged.pop(name, None)
            self._judgements.pop(name, None)
        return judgement

    async def run(self) -> None:
        while not self._stopped:
            await self._arrived.wait()
            self._arrived = self.world.signal()
            while self._queue:
                offer = self._queue.popleft()
                finding = await self._check(offer)
                self.world.spawn(self._tell(offer, finding), "tell")

    async def _check(self, offer: Offer) -> Finding:
        try:
            if self.key_of(offer.file) != offer.key:
                return Finding(code="bad_file", reason="the file's SHA-256 is not its key")
        except RolloutError as error:
            return Finding(code="bad_file", reason=str(error))
        try:  # a stranger's file may take long to read: not on the event loop, and priced with the check
            version = await self.world.compute(Seconds(duration_s=0.0), lambda: self.inspector.version_of(offer))
        except Exception as error:
            return _broken(error)
        until_s = self.world.now() + self.config.weights_wait_s
        while version is not None and version not in self.weights.held():
            if any(held > version for held in self.weights.held()) or self.world.now() >= until_s:
                reason = f"weights {version} are not here; {self.weights.held()} are"
                return Finding(code="no_weights", reason=reason, decided=False)
            await self.weights.arrived().wait(1.0)
        try:
            return await self.world.compute(self.inspector.work, lambda: self.inspector.inspect(offer))
        except Exception as error:
            return _broken(error)

    async def _tell(self, offer: Offer, finding: Finding) -> None:
        """The trainer first, then whoever waits for the judgement."""
        key = self.identity.public_key
        word: Verified | Denied
        if finding.code == "ok":
            word = Verified(offer.public_key, offer.slot, offer.key, offer.file, key)
        else:
            word = Denied(offer.public_key, offer.slot, finding.code, finding.reason, finding.decided, key)
        word = dataclasses.replace(word, signature=self.identity.sign(word_content(word), domain=WORD))
        try:
            reply = await call_patiently(self.world, self.config.trainer, word, self.config.patience)
            code = reply.verdict if isinstance(word, Verified) else finding.code
            judgement = Judgement(code, finding.reason, finding.decided)
        except CallError as error:
            judgement = Judgement("no_verdict", f"the trainer did not take it: {error.reason}", decided=False)
        self.journal(
            "judged",
            slot=offer.slot.index,
            folder=offer.slot.folder,
            worker=offer.public_key,
            key=offer.key,
            code=finding.code if finding.code != "ok" else judgement.code,
            accepted=finding.code == "ok",
            decided=judgement.decided,
            reason=finding.reason,
            rows=finding.rows,
            tokens=finding.tokens,
        )
        name = (offer.slot.index, offer.key)
        self._judgements[name] = judgement
        self._judged[name].set()
        while len(self._judgements) > self.config.remembered:
            oldest = next(iter(self._judgements))
            self._judgements.pop(oldest)
            self._judged.pop(oldest, None)


def _broken(error: Exception) -> Finding:
    """A check that breaks is no verdict, about nobody."""
    return Finding(code="no_verdict", reason=f"{type(error).__name__}: {error}"[:500], decided=False)
