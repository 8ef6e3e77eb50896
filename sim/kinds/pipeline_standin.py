"""Why: a model that fits on no machine here can still be cut, scheduled, committed to and cheated with.

In place of layers there is a checksum: a token's state is made of all states up to it, so a pass that is skipped, done
twice or altered shows in every later token. States have the model's own size, and passes its price; schedule, links,
signatures, commitments, complaints and judgements are the real ones.

Shapes: n tokens, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from refimpl.pipeline.blame import Commitment
from refimpl.pipeline.charge import work_of
from refimpl.pipeline.formation import Parts
from refimpl.pipeline.messages import Member, RingPlan
from refimpl.pipeline.schedule import HeldRow, Pass
from refimpl.work import Forward, ModelSize, Work

PRIME = 31607  # below 0x7F80: every state is the bit pattern of a finite bfloat16
VOCABULARY = 30011
OTHER_LAYERS = ("layer-skipped", "weights-4bit", "stale-weights")
"""Cheats that are other layers than agreed."""

Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Drawn:
    """What a pass gave."""

    states: Bits  # [n, D]
    tokens: npt.NDArray[np.int32] | None = None
    logprobs: npt.NDArray[np.float32] | None = None


def key_of(first: int, end: int, other: bool = False) -> int:
    """What stands for the weights of layers first .. end - 1."""
    return (first * 257 + end * 31 + 4001 * other) % PRIME


def through(values: Sequence[int], total: int, key: int) -> tuple[list[int], int]:
    """States of these tokens after a stage, and its sum over all tokens so far."""
    states = []
    for value in values:
        total = (total * 31 + value + key) % PRIME
        states.append(total)
    return states, total


def draw(state: int, seed: int, answered: int) -> int:
    """The token drawn from a last state."""
    return (state * 7919 + seed * 104729 + answered) % VOCABULARY


def answer_of(prompt: Sequence[int], new: int, seed: int, cuts: Sequence[int]) -> list[int]:
    """The right answer: one sequence, one process."""
    keys = [key_of(first, end) for first, end in zip((0, *cuts), cuts, strict=False)]
    totals, fed, answer = [0] * len(keys), list(prompt), list[int]()
    while len(answer) < new:
        for at, key in enumerate(keys):
            fed, totals[at] = through(fed, totals[at], key)
        answer.append(draw(fed[-1], seed, len(answer)))
        fed = [answer[-1]]
    return answer


def size_between(size: ModelSize, first: int, end: int) -> ModelSize:
    """What layers first .. end - 1 of a model cost."""
    return replace(size, layers=end - first, with_embedding=first == 0, with_head=end == size.layers)


class StandIn:
    """`refimpl.pipeline.formation.Compute` without a model."""

    dtype = "bfloat16"

    def __init__(self, plan: RingPlan, member: Member, size: ModelSize, other: bool) -> None:
        self.size, self.hidden = size_between(size, member.first, member.end), plan.hidden
        self.key, self.last = key_of(member.first, member.end, other), member.end == plan.layers
        kept = plan.micro_batches * plan.rows * plan.capacity_tokens
        self.memory_bytes = int(self.size.weight_bytes + kept * self.size.kv_bytes_per_token)
        self._totals: list[dict[int, int]] = [{} for _ in range(plan.micro_batches)]

    def reset(self) -> None:
        self._totals = [{} for _ in self._totals]

    def work(self, made: Pass) -> Work:
        return work_of(made, self.size)

    def run(self, made: Pass, drawing: Sequence[HeldRow], states: Bits | None) -> Drawn:
        totals, out, lasts, at = self._totals[made.micro_batch], list[int](), list[int](), 0
        for source, target in made.moves:
            totals[target] = totals[source]
        for place, row in enumerate(made.rows, start=made.first_row):
            fed = list(row.tokens) if states is None else states[at : at + row.new, 0].tolist()
            at += row.new
            values, totals[place] = through(fed, 0 if row.past == 0 else totals[place], self.key)
            out += values
            if row.draws:
                lasts.append(values[-1])
        made_states = as_states(out, self.hidden)
        if not self.last:
            return Drawn(made_states)
        tokens = [draw(state, row.seed, row.answered) for state, row in zip(lasts, drawing, strict=True)]
        return Drawn(made_states, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))


def as_states(values: Sequence[int], hidden: int) -> Bits:
    """[n, D], as large as the model's."""
    states = np.zeros((len(values), hidden), np.uint16)
    states[:, 0] = values
    return states


def commit(data: bytes) -> bytes:
    """Of one chunk's bytes. It binds all of them, where a real proof binds the largest."""
    return hashlib.sha256(data).digest()


def parts_of(size: ModelSize, behaviour: str) -> Parts:
    """What a stage is made of."""
    return Parts(
        checkpoint=f"stand-in for {size.name}",
        load=lambda plan, member: StandIn(plan, member, size, behaviour in OTHER_LAYERS),
        commit=lambda plan: commit,
        vocabulary=VOCABULARY,
    )


class StandInReplay:
    """`refimpl.pipeline.verifier.Replay` without a model."""

    def __init__(self, size: ModelSize, cuts: Sequence[int], chunk_tokens: int) -> None:
        self.size, self.chunk_tokens = size, chunk_tokens
        self.keys = [key_of(first, end) for first, end in zip((0, *cuts), cuts, strict=False)]

    def work(self, tokens: Sequence[int]) -> Work:
        return Forward(model=self.size, batch=1, new_tokens=len(tokens))

    def boundaries(self, tokens: Sequence[int]) -> list[list[int]]:
        states, right = list(tokens), []
        for key in self.keys:
            states, _ = through(states, 0, key)
            right.append(states)
        return right

    def deviates(self, boundaries: list[list[int]], stage: int, commitments: Sequence[Commitment]) -> list[bool]:
        return [self._deviates(boundaries[stage], c) for c in commitments]

    def _deviates(self, values: Sequence[int], c: Commitment) -> bool:
        chunk = values[c.chunk * self.chunk_tokens : (c.chunk + 1) * self.chunk_tokens]
        return len(chunk) != c.tokens or commit(as_states(chunk, self.size.hidden).tobytes()) != c.commitment

    def follows(
        self, stage: int, tokens: Sequence[int], fed: bytes | None, sent: bytes | None, stated: Sequence[Commitment]
    ) -> bool:
        inputs = list(tokens) if fed is None else self._values(fed)
        right, _ = through(inputs, 0, self.keys[stage])
        if sent is None:
            return not any(self._deviates(right, c) for c in stated)
        return sent == as_states(right, self.size.hidden).tobytes()

    def _values(self, data: bytes) -> list[int]:
        values: list[int] = np.frombuffer(data, np.uint16).reshape(-1, self.size.hidden)[:, 0].tolist()
        return values
