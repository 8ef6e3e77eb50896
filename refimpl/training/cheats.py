"""Workers that hand in something else than the slot asks for: one function each, and one line in `CHEATS`.

A cheat takes the honest bench and returns the maker that a dishonest worker has instead. Each writes a file that is
well-formed throughout: whoever looks only at the format takes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from refimpl.grpo.messages import SlotGiven
from refimpl.grpo.rollout import Sample
from refimpl.grpo.unit import unit_samples
from refimpl.model.sampler import Sampling
from refimpl.toploc.one_pass import read_replays
from refimpl.toploc.proof import build_proofs
from refimpl.training.bench import Bench, MadeUnit, packed
from refimpl.work import Work


class Maker(Protocol):
    def make(self, slot: SlotGiven, public_key: str, version: int) -> MadeUnit: ...

    def work(self, made: Any) -> Work: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Edited:
    """An honest unit whose rows are edited before they are packed."""

    bench: Bench
    edit: Callable[[Bench, SlotGiven, str, Sequence[Sample]], Sequence[Sample]]

    def make(self, slot: SlotGiven, public_key: str, version: int) -> MadeUnit:
        rows = self.bench.make(slot, public_key, version).rows
        return packed(self.edit(self.bench, slot, public_key, rows))

    def work(self, made: MadeUnit) -> Work:
        return self.bench.work(made)


@dataclasses.dataclass(frozen=True)
class _Written:
    tokens: Any
    logprobs: Any
    proofs: tuple[bytes, ...]


def _inverted(bench: Bench, slot: SlotGiven, public_key: str, rows: Sequence[Sample]) -> list[Sample]:
    """Says of every wrong answer that it was right, and the other way round."""
    answers = [_Written(row.output_tokens, row.output_logprobs, (row.proofs,)) for row in rows]
    rewards = [1.0 - row.task_reward for row in rows]
    asked = bench.brief(slot, public_key)
    return unit_samples(asked, answers, [row.completion for row in rows], rewards, rows[0].step, bench.rules)


def _picked(bench: Bench, slot: SlotGiven, public_key: str, rows: Sequence[Sample]) -> list[Sample]:
    """Answers everything a second time, by seeds of its own, and hands in whichever answer has the higher reward."""
    asked = bench.brief(slot, public_key)
    again = bench.engine.generate(
        [question.prompt for question in asked.questions],
        sampling=Sampling(temperature=bench.plan.temperature),
        seeds=[seed + 1_000_003 for seed in asked.seeds],
        max_new_tokens=bench.rules.new_tokens_max,
    )
    texts = bench.texts([answer.tokens for answer in again])
    rewards = bench.rewards(slot, public_key, texts)
    better = [reward > row.task_reward for reward, row in zip(rewards, rows, strict=True)]
    answers = [
        other if wins else _Written(row.output_tokens, row.output_logprobs, (row.proofs,))
        for row, other, wins in zip(rows, again, better, strict=True)
    ]
    return unit_samples(
        asked,
        answers,
        [text if wins else row.completion for row, text, wins in zip(rows, texts, better, strict=True)],
        [max(reward, row.task_reward) for row, reward in zip(rows, rewards, strict=True)],
        rows[0].step,
        bench.rules,
    )


def forged(
    bench: Bench, slot: SlotGiven, public_key: str, rows: Sequence[Sample], answers: Sequence[Any]
) -> list[Sample]:
    """The unit with these `answers` (tokens) in the place of its own: proofs, log-probabilities and rewards are those
    that the right model and the verifier give them. Only the seeds do not."""
    replays = bench.engine.replay([row.input_tokens.tolist() for row in rows], answers)
    sampling = Sampling(temperature=bench.plan.temperature)
    readings = read_replays(replays, [row.seed or 0 for row in rows], sampling)
    settings, written = bench.proof, []
    for replay, reading, tokens in zip(replays, readings, answers, strict=True):
        proofs = build_proofs(
            replay.states, chunk_tokens=settings.chunk_tokens, top_k=settings.top_k, mode=settings.mode
        )
        logprobs = np.log(np.maximum(reading.probabilities, 1e-12))
        written.append(_Written(tokens, logprobs, tuple(proof.encode() for proof in proofs)))
    texts = bench.texts(answers)
    rewards = bench.rewards(slot, public_key, texts)
    return unit_samples(bench.brief(slot, public_key), written, texts, rewards, rows[0].step, bench.rules)


def _cut(bench: Bench, slot: SlotGiven, public_key: str, rows: Sequence[Sample]) -> list[Sample]:
    """Stops halfway through every answer and puts an end token there: saves the rest."""
    end = min(bench.ends)
    answers = [np.append(row.output_tokens[: len(row.output_tokens) // 2], end).astype(np.int32) for row in rows]
    return forged(bench, slot, public_key, rows, answers)


def _noise(bench: Bench, slot: SlotGiven, public_key: str, rows: Sequence[Sample]) -> list[Sample]:
    """Runs no model worth the name: random answers, every second one said to be right, proofs of random bytes."""
    rng = np.random.default_rng([slot.folder, slot.place])
    low, high = max(bench.ends) + 1, bench.decoder.config.vocabulary
    answers = []
    for row in rows:
        tokens = rng.integers(low, high, bench.rules.new_tokens_max).astype(np.int32)
        logprobs = np.full(len(tokens), -0.7, dtype=np.float32)
        answers.append(_Written(tokens, logprobs, (rng.bytes(len(row.proofs)),)))
    asked = bench.brief(slot, public_key)
    rewards = [float(index % 2) for index in range(len(rows))]
    texts = bench.texts([answer.tokens for answer in answers])
    return unit_samples(asked, answers, texts, rewards, rows[0].step, bench.rules)


@dataclasses.dataclass(frozen=True, eq=False)
class Stale:
    """Never loads new weights: generates with the checkpoint that the run began with, and names the current one."""

    bench: Bench
    first: int = 0

    def make(self, slot: SlotGiven, public_key: str, version: int) -> MadeUnit:
        rows = self.bench.make(slot, public_key, self.first if self.bench.version < 0 else self.bench.version).rows
        return packed([dataclasses.replace(row, step=version) for row in rows])

    def work(self, made: MadeUnit) -> Work:
        return self.bench.work(made)


CHEATS: dict[str, Callable[[Bench], Maker]] = {
    "rewards-inverted": lambda bench: Edited(bench, _inverted),
    "answers-picked": lambda bench: Edited(bench, _picked),
    "answers-cut": lambda bench: Edited(bench, _cut),
    "noise": lambda bench: Edited(bench, _noise),
    "weights-stale": lambda bench: Stale(bench),
}


def maker_of(behaviour: str, bench: Bench) -> Maker:
    """What a worker of this behaviour generates with. Raises ValueError that lists the known ones."""
    if behaviour == "honest":
        return bench
    if behaviour not in CHEATS:
        raise ValueError(f"behaviour {behaviour!r} is unknown, expected 'honest' or one of {sorted(CHEATS)}")
    return CHEATS[behaviour](bench)
