"""The trainer: hands out slots, takes verified files, steps when a folder is complete, publishes, and never waits for a
broadcast.

Takes `AskSlot` (held until something may be started), `Verified` and `Denied`. A file is acknowledged once it is on
disk; from then on it is trained exactly once or counted as lost, whatever crashes. Files are unpacked as they come, so
that a step finds its batch in memory.

One version: the folder's units, in the order of their places, make one batch; its weights, optimizer and books are
saved as one checkpoint; then the checkpoint is published, marker last. A version is published after the one before it,
so none is skipped; a trainer that comes back publishes what it had not.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from refimpl.grpo.messages import (
    SLOT,
    WORD,
    AskSlot,
    Denied,
    Receipt,
    RunOver,
    SlotGiven,
    Verified,
    question_content,
    word_content,
)
from refimpl.grpo.rollout import RolloutError, Sample
from refimpl.grpo.staleness import Pacer, PacingConfig, Slot, Trained, Unit, Verdict, violations
from refimpl.identity import verify
from refimpl.journal import Journal, silent
from refimpl.messages import Blob, Later, Message, Ok
from refimpl.work import Work
from refimpl.world import Refused, World

HOLD_S_MAX = 60.0
LOOK_S = 1.0
"""Deadlines are looked at this often while questions are held."""
LEFT_S_MIN = 1e-3
"""Less is not waited for: rounded to a clock's tick it could be for ever."""


class Student(Protocol):
    """What is trained: `refimpl.training` makes it of a model and an optimizer."""

    def learn(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One version's step; its figures."""
        ...

    def work(self, samples: Sequence[Sample]) -> Work:
        """What that costs."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Records(Protocol):
    """What must outlive the trainer's process, and how a rollout file is read: `vault.Vault` on a disk."""

    def key_of(self, file: Blob) -> str:
        """The name that the file's content gives it; RolloutError where it has none."""
        ...

    def read(self, file: Blob) -> Sequence[Sample]:
        """The rows of a file that may be anything. Raises RolloutError."""
        ...

    def accept(self, unit: Unit, file: Blob) -> None:
        """When this returns, the file is safe. Raises OSError where it cannot be kept, and then nothing of it is."""
        ...

    def accepted(self) -> list[Unit]: ...

    def rollouts(self, unit: Unit) -> Sequence[Sample]: ...

    def save(self, version: int, books: dict[str, Any], write: Callable[[Path], None]) -> Path: ...

    def versions(self) -> list[int]: ...

    def folder(self, version: int) -> Path: ...

    def books(self, version: int) -> dict[str, Any]: ...

    def log_trained(self, version: int, units: Sequence[Unit]) -> None: ...

    def trained(self) -> list[Trained]: ...

    def forget_trained(self, version: int) -> None: ...


Publish = Callable[[int, Path], Coroutine[Any, Any, None]]
"""Broadcast checkpoint v out of its folder; returns once it is out. Saying it twice does no harm."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    pacing: PacingConfig
    steps: int  # versions to make
    validators: frozenset[str]  # public keys
    online_filter: bool = True  # train only answers that carry a signal, and wait for enough of those
    denials_to_ban: int = 1  # files that failed a check, after which a worker gets no more slots
    held_back_s: float = 0.5  # how long a worker is told to wait when nothing may be started


class Trainer:
    """`serve()`, then `run()`, which ends when all steps are made or `stop()` was called."""

    def __init__(
        self,
        world: World,
        config: TrainerConfig,
        student: Student,
        vault: Records,
        publish: Publish,
        journal: Journal = silent,
    ) -> None:
        assert config.pacing.folders == config.steps, "nothing is to be generated that will not be trained"
        self.world, self.config, self.student = world, config, student
        self.vault, self.publish, self.journal = vault, publish, journal
        self.pacer = Pacer(config.pacing)
        self.over = False
        self._asked: dict[str, tuple[int, Message | None]] = {}  # public key -> its last question, and the answer
        self._denials: dict[str, list[int]] = {}  # public key -> slots that it filled wrongly
        self._rows: dict[str, list[Sample]] = {}  # accepted and not trained yet, unpacked
        self._verdicts: dict[str, tuple[int, Verdict]] = {}  # key -> folder, what was said: a reply may be lost
        self._to_publish: list[int] = []
        self._changed = world.signal()

    # -- the beginning --

    def begin(self) -> None:
        """Take up the run where the vault says it is; before `serve()`. Raises ValueError when books and weights do not
        belong together."""
        versions = self.vault.versions()
        if versions:
            version = versions[-1]
            books = self.vault.books(version)
            self.pacer = Pacer.restore(self.config.pacing, books["pacer"], version, self.world.now())
            self._denials = dict(books["denials"])
            self.student.load(self.vault.folder(version))
            self._mend_log(version, [Unit(**(unit | {"slot": Slot(**unit["slot"])})) for unit in books["trained"]])
            self._readmit()
        else:
            self._save([])
        self._to_publish = self.vault.versions()
        self.journal("begun", version=self.pacer.version, accepted=len(self._rows))

    def _mend_log(self, version: int, trained: list[Unit]) -> None:
        """The log of what was trained ends where the checkpoint does, with or without the crash in between."""
        self.vault.forget_trained(version)
        logged = self.vault.trained()
        if trained and (not logged or logged[-1].version < version - 1):
            self.vault.log_trained(version - 1, trained)

    def _readmit(self) -> None:
        """What was acknowledged before the crash, the books saved before or after it."""
        known = {unit["key"] for unit in self.pacer.state()["accepted"]}
        for unit in self.vault.accepted():
            if unit.slot.folder < self.pacer.version:
                continue
            if unit.key not in known:
                verdict = self.pacer.readmit(unit)
                assert verdict is Verdict.ACCEPTED, f"unit {unit.key} was accepted, and now is {verdict.value}"
            self._rows[unit.key] = list(self.vault.rollouts(unit))
            self._verdicts[unit.key] = (unit.slot.folder, Verdict.ACCEPTED)

    def serve(self) -> None:
        self.world.serve({AskSlot: self.ask, Verified: self.take, Denied: self.deny})

    def stop(self) -> None:
        self.over = True
        self._poke()

    # -- the loop --

    async def run(self) -> None:
        await self._publish_due()
        while not self.over and self.pacer.version < self.config.steps:
            changed = self._changed
            units = self.pacer.ready()
            if units is None:
                await changed.wait()
            else:
                await self._train(units)
                await self._publish_due()
        self.stop()

    async def _train(self, units: list[Unit]) -> None:
        version = self.pacer.version
        samples = [sample for unit in units for sample in self._rows[unit.key]]
        figures = await self.world.compute(self.student.work(samples), lambda: self.student.learn(samples))
        self.pacer.advance()
        for unit in units:
            self._rows.pop(unit.key)
        self._verdicts = {key: said for key, said in self._verdicts.items() if said[0] >= version - HISTORY}
        self._poke()  # workers may begin the next folder now
        self._save(units)
        self.vault.log_trained(version, units)
        self._to_publish.append(self.pacer.version)
        self._poke()
        ages = [version - unit.oldest_version for unit in units]
        books = self.pacer.books
        self.journal(
            "trained",
            version=self.pacer.version,
            units=len(units),
            age_mean=sum(ages) / len(ages),
            age_max=max(ages),
            lost_share=books.lost_share,
            length_bias=books.length_bias,
            expired=books.expired,
            **figures,
        )

    def _save(self, units: list[Unit]) -> None:
        books = {"pacer": self.pacer.state(), "denials": self._denials, "trained": [asdict(unit) for unit in units]}
        self.vault.save(self.pacer.version, books, self.student.save)

    async def _publish_due(self) -> None:
        """One version after another, none left out. Cutting and hashing comes before the next step, as in the original;
        the transfers, which take long, are pulled by others while that is made."""
        while self._to_publish and not self.over:
            version = self._to_publish[0]
            await self.publish(version, self.vault.folder(version))
            self._to_publish.pop(0)

    def _poke(self) -> None:
        changed, self._changed = self._changed, self.world.signal()
        changed.set()

    # -- what others ask --

    async def ask(self, source: str, question: AskSlot) -> Message:
        """A slot as soon as one may be given out, or word that there is none."""
        key = question.public_key
        if not verify(key, question_content(question), question.signature, domain=SLOT):
            raise Refused("the question is not signed by the key that it names")
        number, answer = self._asked.get(key, (-1, None))
        if question.number < number:
            raise Refused(f"question {question.number} is older than question {number}")
        if question.number == number and answer is not None:
            return answer
        self._asked[key] = (question.number, None)
        for lost in self.pacer.slots_of(key):
            if lost.index not in question.working:
                self.pacer.give_up(lost.index)
                self.journal("given_up", slot=lost.index, folder=lost.folder, worker=source)
                self._poke()
        until_s = self.world.now() + min(max(question.patience_s, 0.0), HOLD_S_MAX)
        while self._asked[key] == (question.number, None):
            answer = self._slot_for(key, source)
            if answer is not None:
                self._asked[key] = (question.number, answer)
                return answer
            left_s = until_s - self.world.now()
            if left_s < LEFT_S_MIN:
                break
            await self._changed.wait(min(left_s, LOOK_S))
        return self._asked[key][1] or Later(self.config.held_back_s, "nothing may be started yet")

    def _slot_for(self, key: str, source: str) -> Message | None:
        if self.over or self.pacer.version >= self.config.steps:
            return RunOver(f"the run ends with version {self.pacer.version}")
        if len(self._denials.get(key, ())) >= self.config.denials_to_ban:
            return RunOver("your work failed a check: no more is wanted")
        for expired in self.pacer.expire(self.world.now()):
            self.journal("expired", slot=expired.index, folder=expired.folder, worker=expired.worker)
        slot = self.pacer.issue(key, self.world.now())
        if slot is None:
            return None
        self.journal("slot", slot=slot.index, folder=slot.folder, place=slot.place, to=source)
        return _given(slot)

    async def take(self, source: str, word: Verified) -> Message:
        """A file that a validator answers for: on disk, then acknowledged."""
        self._check_word(word)
        if word.key in self._verdicts:
            return Receipt(self._verdicts[word.key][1].value)
        slot = self.pacer.slot(word.slot.index)
        if slot is None or _given(slot) != word.slot or slot.worker != word.public_key:
            return Receipt(Verdict.REFUSED.value)
        try:
            if self.vault.key_of(word.file) != word.key:
                raise Refused("the file's SHA-256 is not its key")
            rows = list(self.vault.read(word.file))
        except RolloutError as error:
            raise Refused(f"the file cannot be read: {error}") from error
        useful = [row for row in rows if row.advantage != 0.0 or not self.config.online_filter]
        tokens, all_tokens = (sum(len(row.output_tokens) for row in some) for some in (useful, rows))
        try:  # no await from here to the end: what is in the books is in the vault
            verdict = self.pacer.hand_in(
                slot.index,
                slot.worker,
                key=word.key,
                oldest_version=min(row.step for row in rows),
                samples=len(useful),
                tokens=tokens,
                filtered_samples=len(rows) - len(useful),
                filtered_tokens=all_tokens - tokens,
                keep=lambda unit: self.vault.accept(unit, word.file),
            )
        except OSError as error:  # a full disk, say
            self.journal("not_kept", slot=slot.index, folder=slot.folder, key=word.key, reason=str(error))
            raise Refused(f"the file could not be kept: {error}") from error
        if verdict is Verdict.ACCEPTED:
            self._rows[word.key] = rows
        self._verdicts[word.key] = (slot.folder, verdict)
        self.journal("taken", slot=slot.index, folder=slot.folder, key=word.key, verdict=verdict.value)
        self._poke()
        return Receipt(verdict.value)

    async def deny(self, source: str, word: Denied) -> Message:
        """A file that failed: another worker gets the slot."""
        self._check_word(word)
        slot = self.pacer.slot(word.slot.index)
        if slot is not None and _given(slot) == word.slot and slot.worker == word.public_key:
            self.pacer.give_up(slot.index)
        denials = self._denials.setdefault(word.public_key, [])
        if word.decided and word.slot.index not in denials:  # it may be said twice
            denials.append(word.slot.index)
        self.journal("denied", slot=word.slot.index, worker=word.public_key, code=word.code, reason=word.reason)
        self._poke()
        return Ok()

    def _check_word(self, word: Verified | Denied) -> None:
        if word.validator not in self.config.validators:
            raise Refused("this key is no validator's")
        if not verify(word.validator, word_content(word), word.signature, domain=WORD):
            raise Refused("not signed by the validator that it names")

    # -- the checker --

    def broken_promises(self) -> list[str]:
        """What does not hold of all that was trained so far, crashes included; by the vault's log, not the books."""
        return violations(self.vault.trained(), self.config.pacing.max_age)


HISTORY = 8
"""Versions for which a lost acknowledgement can be said again."""


def _given(slot: Slot) -> SlotGiven:
    return SlotGiven(slot.index, slot.folder, slot.checkpoint, slot.counter, slot.place)
