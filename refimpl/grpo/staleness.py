"""How old may data be, who may start what, and what was lost on the way.

Asynchrony is only safe while one sentence holds: *no trained token is older than k versions*, where the age of a sample
is the version it trains minus the **oldest** version that generated any of its tokens, taken when it is **consumed**.
Throwing away what turned out too old keeps the sentence true and the model wrong: long answers are slow, so they are
what is thrown away. Here work is *paced* instead: none is started that could not be consumed in time.

The rule of the original (prime-rl, April 2025): rollout folder s is generated with checkpoint max(0, s - k) and trained
by version s, so its age is min(s, k). Checkpoint v is the weights after training on folders 0..v-1. `Pacer` hands out
the slots of folder s as soon as that checkpoint exists, that is while s ≤ version + k, and fills folders in order.

Differs from the original:
1) slots are handed out and counted, so a full folder attracts no more work (there, every file beyond the 4096th row was
   generated for nothing); with `oversubscribe` > 1 the surplus is back, on purpose, and reported;
2) a slot has a deadline, after which another worker gets one: an endless rollout cannot block a step;
3) a slot that failed or expired is handed out again at its own place, with its own problems: nobody gets rid of a
   problem by dropping it, and slow problems are not traded for quick ones;
4) the books are restored together with the version they belong to, and refuse any other: with counters at 0 beside
   version 100, capacity would be a hundred folders too large.

Unit: what one worker hands in for one slot (a file with whole groups of answers).
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


def checkpoint_for(folder: int, max_age: int) -> int:
    """The checkpoint that generates rollout folder `folder`: max(0, s - k)."""
    return max(0, folder - max_age)


def age_at_consumption(trained_version: int, generating_versions: Iterable[int]) -> int:
    """Trained version minus the oldest generating version. ValueError where there is none, or one not made yet."""
    versions = list(generating_versions)
    if not versions:
        raise ValueError("a sample names no version that generated it, so its age is unknown")
    if max(versions) > trained_version:
        raise ValueError(f"a sample names version {max(versions)}, which version {trained_version} cannot have seen")
    return trained_version - min(versions)


def age_in_optimizer_steps(age: int, mini_step: int, steps_per_version: int) -> int:
    """The other staleness: several optimizer steps on one batch move the policy on while the batch stays. The m-th of
    them (from 0) trains data that is `age` versions of `steps_per_version` steps old, and m steps more."""
    return age * steps_per_version + mini_step


@dataclass(frozen=True, kw_only=True)
class PacingConfig:
    samples_per_step: int  # samples with a signal that a folder needs before it is trained
    samples_per_unit: int  # samples of one unit, before the online filter
    max_age: int = 2  # k; 0 is synchronous
    deadline_s: float | None = None  # a slot open for longer no longer counts as coming; None: for ever
    oversubscribe: float = 1.0  # slots handed out at once, over those needed if all samples carry a signal; at least 1
    folders: int | None = None  # that the run will train; None: no end

    def __post_init__(self) -> None:
        for name in ("samples_per_step", "samples_per_unit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.max_age < 0:
            raise ValueError(f"max_age is {self.max_age}, expected 0 (synchronous) or more")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(f"deadline_s is {self.deadline_s}, expected more than 0 or None")
        if not self.oversubscribe >= 1:
            raise ValueError(f"oversubscribe is {self.oversubscribe}, expected 1 or more")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Leave to generate one unit."""

    index: int  # unique in the run, ascending
    folder: int  # the version that will train it
    checkpoint: int  # the version to generate it with
    worker: str
    counter: int  # the worker's how-manieth in this folder, from 1: an input of the deterministic problem choice
    place: int = 0  # in the folder, from 0: the other input to choose problems by, the same whoever takes the slot


@dataclass(frozen=True, kw_only=True)
class Unit:
    """An accepted unit, as the books keep it."""

    slot: Slot
    key: str  # content hash
    oldest_version: int  # that generated any of its tokens
    samples: int  # with a signal, the ones that are trained
    tokens: int  # their answer tokens
    filtered_samples: int = 0  # taken out by the online filter: no signal
    filtered_tokens: int = 0


class Verdict(enum.Enum):
    """What became of a unit that was handed in. Only ACCEPTED is trained."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # this content was accepted before
    SURPLUS = "surplus"  # its folder has enough already, or is trained
    STALE = "stale"  # generated by weights older than its folder allows
    REFUSED = "refused"  # not this worker's slot, or one answered before, or a version that does not exist


@dataclass
class Tally:
    """Answers and their lengths: enough to say whether what was trained is longer or shorter than what was not."""

    samples: int = 0
    tokens: int = 0

    def add(self, samples: int, tokens: int) -> None:
        self.samples += samples
        self.tokens += tokens

    @property
    def mean_tokens(self) -> float | None:
        return self.tokens / self.samples if self.samples else None


@dataclass
class Books:
    """What was trained and what was lost, by reason. `expired` slots have no length: nobody saw their answers."""

    trained: Tally = field(default_factory=Tally)
    lost: dict[str, Tally] = field(default_factory=dict)  # "surplus", "stale", "duplicate", "filtered"
    expired: int = 0

    def lose(self, reason: str, samples: int, tokens: int) -> None:
        if samples:
            self.lost.setdefault(reason, Tally()).add(samples, tokens)

    @property
    def length_bias(self) -> float | None:
        """Mean answer length of what was trained, over that of all that was handed in, minus 1. Below 0: long answers
        were lost. None while nothing was trained."""
        tokens = self.trained.tokens + sum(tally.tokens for tally in self.lost.values())
        samples = self.trained.samples + sum(tally.samples for tally in self.lost.values())
        if not self.trained.samples or not tokens:
            return None
        return (self.trained.tokens / self.trained.samples) / (tokens / samples) - 1

    @property
    def lost_share(self) -> float:
        """Share of the samples handed in that were never trained."""
        lost = sum(tally.samples for tally in self.lost.values())
        return lost / (lost + self.trained.samples) if lost else 0.0


class Pacer:
    """Hands out slots, takes in units, and says when a folder is complete. Knows no clock: `now` is an argument."""

    def __init__(self, config: PacingConfig) -> None:
        self.config = config
        self.version = 0  # folders trained so far, and the newest checkpoint
        self.books = Books()
        self._next_index = 0
        self._counters: dict[tuple[int, str], int] = {}  # (folder, worker) -> slots handed out
        self._open: dict[int, Slot] = {}  # handed out, neither answered nor expired
        self._late: dict[int, Slot] = {}  # expired: no longer counted on, still welcome
        self._deadlines: deque[tuple[float, int]] = deque()  # (deadline, slot index), in order of both
        self._accepted: dict[int, dict[int, Unit]] = {}  # folder -> slot index -> unit
        self._useful: Counter[int] = Counter()  # folder -> accepted samples with a signal
        self._open_slots: Counter[int] = Counter()  # folder -> slots open
        self._keys: dict[str, int] = {}  # content accepted -> oldest version, kept while it could pass again

    # -- handing out --

    def issue(self, worker: str, now: float) -> Slot | None:
        """A slot for `worker` in the first folder that lacks work, or None: nothing may be started at this version."""
        self.expire(now)
        wanted = self.config.samples_per_step * self.config.oversubscribe
        end = self.version + self.config.max_age + 1
        for folder in range(self.version, end if self.config.folders is None else min(end, self.config.folders)):
            # accepted, plus what the open slots bring if all their samples carry a signal
            coming = self._useful[folder] + self._open_slots[folder] * self.config.samples_per_unit
            if coming < wanted and not self._full(folder):
                return self._hand_out(folder, worker, now)
        return None

    def expire(self, now: float) -> list[Slot]:
        """Slots whose deadline has passed: others may be handed out in their place. Late answers stay welcome."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            slot = self._close(self._deadlines.popleft()[1])
            if slot is not None:
                expired.append(slot)
                self._late[slot.index] = slot
                self.books.expired += 1
        return expired

    def _hand_out(self, folder: int, worker: str, now: float) -> Slot:
        counter = self._counters[folder, worker] = self._counters.get((folder, worker), 0) + 1
        checkpoint = checkpoint_for(folder, self.config.max_age)
        assert checkpoint <= self.version, "a slot may only name weights that exist"
        slot = Slot(
            index=self._next_index,
            folder=folder,
            checkpoint=checkpoint,
            worker=worker,
            counter=counter,
            place=self._free_place(folder),
        )
        self._next_index += 1
        self._reopen(slot, now)
        return slot

    def _free_place(self, folder: int) -> int:
        """The first place of the folder that is neither filled nor being worked at."""
        taken = {unit.slot.place for unit in self._accepted.get(folder, {}).values()}
        taken |= {slot.place for slot in self._open.values() if slot.folder == folder}
        place = 0
        while place in taken:
            place += 1
        return place

    def _reopen(self, slot: Slot, now: float) -> None:
        self._open[slot.index] = slot
        self._open_slots[slot.folder] += 1
        if self.config.deadline_s is not None:
            self._deadlines.append((now + self.config.deadline_s, slot.index))

    def _close(self, slot_index: int) -> Slot | None:
        slot = self._open.pop(slot_index, None)
        if slot is not None:
            self._open_slots[slot.folder] -= 1
        return slot

    def _full(self, folder: int) -> bool:
        return self._useful[folder] >= self.config.samples_per_step

    # -- taking in --

    def slot(self, slot_index: int) -> Slot | None:
        """A slot that is still waited for, or welcome."""
        return self._open.get(slot_index) or self._late.get(slot_index)

    def slots_of(self, worker: str) -> list[Slot]:
        """What this worker was given and has not answered, late ones too."""
        return [slot for slot in [*self._open.values(), *self._late.values()] if slot.worker == worker]

    def hand_in(
        self,
        slot_index: int,
        worker: str,
        *,
        key: str,
        oldest_version: int,
        samples: int,
        tokens: int,
        filtered_samples: int = 0,
        filtered_tokens: int = 0,
        keep: Callable[[Unit], None] = lambda unit: None,
    ) -> Verdict:
        """Judge a unit that passed verification. Its content counts once, whatever slots it comes in by. `keep(unit)`
        makes an accepted one safe before it counts; where it raises, the books are as they were."""
        slot = self.slot(slot_index)
        if slot is None or slot.worker != worker or oldest_version > self.version:
            return Verdict.DUPLICATE if key in self._keys else Verdict.REFUSED
        unit = Unit(
            slot=slot,
            key=key,
            oldest_version=oldest_version,
            samples=samples,
            tokens=tokens,
            filtered_samples=filtered_samples,
            filtered_tokens=filtered_tokens,
        )
        verdict = self._judge(unit, keep)
        self.give_up(slot_index)
        return verdict

    def give_up(self, slot_index: int) -> None:
        """The unit of this slot failed verification, or its worker left: another slot may take its place."""
        self._close(slot_index)
        self._late.pop(slot_index, None)

    def readmit(self, unit: Unit) -> Verdict:
        """After a crash, before anything else is handed out or taken in: a unit that was accepted after the books were
        last saved, and that its owner found on disk. The slot is taken as recorded, and will not be handed out again.
        """
        slot = unit.slot
        self._next_index = max(self._next_index, slot.index + 1)
        counter = self._counters.get((slot.folder, slot.worker), 0)
        self._counters[slot.folder, slot.worker] = max(counter, slot.counter)
        self.give_up(slot.index)
        return self._judge(unit)

    def _judge(self, unit: Unit, keep: Callable[[Unit], None] = lambda unit: None) -> Verdict:
        folder = unit.slot.folder
        if unit.key in self._keys:
            verdict = Verdict.DUPLICATE
        elif unit.oldest_version < checkpoint_for(folder, self.config.max_age):
            verdict = Verdict.STALE
        elif folder < self.version or self._full(folder) or self._filled(unit.slot):
            verdict = Verdict.SURPLUS
        else:
            keep(unit)
            self._keep(unit)
            self._keys[unit.key] = unit.oldest_version
            self.books.lose("filtered", unit.filtered_samples, unit.filtered_tokens)
            return Verdict.ACCEPTED
        self.books.lose(verdict.value, unit.samples + unit.filtered_samples, unit.tokens + unit.filtered_tokens)
        return verdict

    def _filled(self, slot: Slot) -> bool:
        return any(unit.slot.place == slot.place for unit in self._accepted.get(slot.folder, {}).values())

    def _keep(self, unit: Unit) -> None:
        self._accepted.setdefault(unit.slot.folder, {})[unit.slot.index] = unit
        self._useful[unit.slot.folder] += unit.samples

    # -- training --

    def ready(self) -> list[Unit] | None:
        """The units that the next version trains, by place whatever order they came in; None until complete."""
        if not self._full(self.version):
            return None
        units = sorted(self._accepted[self.version].values(), key=lambda unit: unit.slot.place)
        for unit in units:
            age = age_at_consumption(self.version, [unit.oldest_version])
            assert age <= self.config.max_age, f"unit {unit.key} would be trained at age {age}"
        return units

    def advance(self) -> int:
        """The folder of this version has been trained: returns the new version."""
        units = self.ready()
        assert units is not None, f"folder {self.version} is not complete, so it cannot have been trained"
        for unit in units:
            self.books.trained.add(unit.samples, unit.tokens)
        del self._accepted[self.version], self._useful[self.version]
        self.version += 1
        oldest = self.version - self.config.max_age
        for slot in [*self._open.values(), *self._late.values()]:
            if slot.folder < oldest:
                self.give_up(slot.index)
        self._counters = {key: count for key, count in self._counters.items() if key[0] >= self.version}
        self._keys = {key: version for key, version in self._keys.items() if version >= oldest}
        return self.version

    # -- crash and resume --

    def state(self) -> dict[str, Any]:
        """All that must be saved beside the weights of `version`: JSON-able."""
        return {
            "version": self.version,
            "config": asdict(self.config),
            "next_index": self._next_index,
            "counters": [[folder, worker, count] for (folder, worker), count in self._counters.items()],
            "outstanding": [asdict(slot) for slot in [*self._open.values(), *self._late.values()]],
            "accepted": [asdict(unit) for units in self._accepted.values() for unit in units.values()],
            "keys": dict(self._keys),
            "books": asdict(self.books),
        }

    @classmethod
    def restore(cls, config: PacingConfig, state: dict[str, Any], version: int, now: float) -> Pacer:
        """The books as they were saved with `version`. Slots then open are given a whole deadline again; without
        deadlines nobody may wait for them, so they count as late. Raises ValueError when books and weights are of
        different versions or settings."""
        if state["version"] != version:
            raise ValueError(
                f"these books belong to version {state['version']}, the weights to version {version}: "
                "restored apart, they would let data of any age in"
            )
        for name in ("max_age", "samples_per_step", "samples_per_unit"):
            if state["config"][name] != getattr(config, name):
                raise ValueError(f"{name} was {state['config'][name]} when the run began, now {getattr(config, name)}")
        pacer = cls(config)
        pacer.version, pacer._next_index = version, state["next_index"]
        pacer._counters = {(folder, worker): count for folder, worker, count in state["counters"]}
        outstanding = [Slot(**slot) for slot in state["outstanding"]]
        if config.deadline_s is None:
            pacer._late = {slot.index: slot for slot in outstanding}
        else:
            for slot in outstanding:
                pacer._reopen(slot, now)
        for saved in state["accepted"]:
            pacer._keep(Unit(**(saved | {"slot": Slot(**saved["slot"])})))
        pacer._keys = dict(state["keys"])
        books = state["books"]
        pacer.books = Books(
            trained=Tally(**books["trained"]),
            lost={reason: Tally(**tally) for reason, tally in books["lost"].items()},
            expired=books["expired"],
        )
        return pacer


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One unit, as an outside checker sees it trained."""

    version: int
    key: str
    oldest_version: int


def violations(trained: Iterable[Trained], max_age: int) -> list[str]:
    """The checker, which shares nothing with the books: every sentence that does not hold for what was trained, in
    order. No unit older than `max_age`; none trained twice; no version skipped or repeated out of turn."""
    found: list[str] = []
    seen: dict[str, int] = {}
    newest = -1
    for unit in trained:
        age = unit.version - unit.oldest_version
        if not 0 <= age <= max_age:
            found.append(f"version {unit.version} trained {unit.key} at age {age}, allowed 0 to {max_age}")
        if unit.key in seen:
            found.append(f"version {unit.version} trained {unit.key}, which version {seen[unit.key]} had trained")
        if wrong := out_of_turn(unit.version, newest):
            found.append(wrong)
        newest = max(newest, unit.version)
        seen[unit.key] = unit.version
    return found


def out_of_turn(version: int, newest: int) -> str:
    """Why a version may not be trained after `newest` (-1: before any other); empty: it is that one or the next."""
    if version in (newest, newest + 1):
        return ""
    return f"version {version} was trained {f'after version {newest}' if newest >= 0 else 'before any other'}"
