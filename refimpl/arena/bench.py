"""Makes what the arena judges: for each behaviour the same sequences, as this behaviour answers them.

All behaviours get the same prompts and seeds, so a cell differs from another by the behaviour alone. Sequences are made
a batch at a time and kept in a folder; a run that is ended goes on where it was. `deal` is what one batch holds.

Shapes: n tokens of one answer, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refimpl.attacks.catalogue import ATTACKS
from refimpl.attacks.honest import HONEST
from refimpl.model.transformer import Decoder
from refimpl.work import Work
from refimpl.workshop import Agreement, BoundEngine, Workshop

ROOT = Path(__file__).parents[2]
RECOMPUTED = "recomputed"
"""What the verifier itself generates when it checks by doing everything again: in batches of another size."""
CALIBRATION = 100_000
"""First index of the sequences that limits are calibrated on; those that are judged count from 0."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, a task, a rule of sampling, and how many sequences a cell has."""

    name: str
    model_path: Path
    prompts: str
    tokens_max: int
    temperature: float
    top_p: float
    batch: int
    sequences: int  # a cell
    honest_sequences: int  # in each honest cell
    calibration_sequences: int  # in each honest cell, apart from those judged

    def agreement(self) -> Agreement:
        return Agreement(
            model_path=str(self.model_path),
            prompts=self.prompts,
            batch=self.batch,
            answer_tokens_max=self.tokens_max,
            temperature=self.temperature,
            top_p=self.top_p,
        )


SETTINGS: dict[str, Setting] = {
    "tiny": Setting(
        name="tiny",
        model_path=ROOT / "tests" / "data" / "tiny-model",
        prompts="toy",
        tokens_max=64,
        temperature=2.0,
        top_p=0.95,
        batch=100,
        sequences=100,
        honest_sequences=200,
        calibration_sequences=100,
    ),
    "smollm2": Setting(
        name="smollm2",
        model_path=ROOT / "models" / "SmolLM2-135M-Instruct",
        prompts="instructions",
        tokens_max=128,
        temperature=0.8,
        top_p=0.95,
        batch=8,
        sequences=8,
        honest_sequences=8,
        calibration_sequences=8,
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sent:
    """One answer as it was handed in, with the states that its commitments are made from."""

    index: int
    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    states: torch.Tensor  # bf16 [n, D]
    cheated: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What one call of a behaviour's engine gave."""

    sent: tuple[Sent, ...]
    work: Work  # what it would cost on a real device
    cpu_s: float  # what it cost here


class ArenaShop(Workshop):
    """A workshop whose engines keep their states: commitments of every kind are made from them."""

    def engine(self, decoder: Decoder, *, batch: int | None = None, **options: Any) -> BoundEngine:
        return super().engine(decoder, batch=batch, **(options | {"keep_states": True}))


class Bench:
    """The sequences of one setting, made when first asked for."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder = setting, folder / setting.name

    @cached_property
    def shop(self) -> Workshop:
        return ArenaShop(self.setting.agreement())

    def prompt(self, index: int) -> Sequence[int]:
        """Sequence `index`'s prompt: problems in an order that spreads over the set."""
        return self.shop.prompt_of(index * 37 % self.shop.problem_count)

    def seed(self, index: int) -> int:
        return 1_000_000 + index

    def engine(self, behaviour: str) -> Any:
        """A new engine of this behaviour. Its parts that cost something (changed weights) are made once."""
        if behaviour == RECOMPUTED:
            return self.shop.engine(self.shop.decoder(), batch=max(1, self.setting.batch // 2 + 1))
        if behaviour in HONEST:
            return HONEST[behaviour](self.shop)
        engine = ATTACKS[behaviour].engine(self.shop)
        return engine

    def batches(self, behaviour: str, count: int, first: int = 0) -> Iterator[Batch]:
        """Sequences `first` … `first + count − 1`, a batch at a time, from the folder where they are there."""
        size = self.setting.batch
        for at in range(first, first + count, size):
            path = self.folder / behaviour / f"{at}.pt"
            wanted = min(size, first + count - at)
            batch = _load(path)
            if batch is None or len(batch.sent) < wanted:
                batch = self.deal(behaviour, range(at, at + wanted))
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(".partial")
                torch.save(batch, partial)
                partial.rename(path)
            yield Batch(sent=batch.sent[:wanted], work=batch.work, cpu_s=batch.cpu_s)

    def deal(self, behaviour: str, indices: Sequence[int]) -> Batch:
        """One batch, made now."""
        engine = self.engine(behaviour)
        prompts = [self.prompt(index) for index in indices]
        began = time.process_time()
        answers = engine.answer(prompts, [self.seed(index) for index in indices])
        cpu_s = time.process_time() - began
        cheated = getattr(engine, "cheated", [behaviour in ATTACKS] * len(answers))
        sent = tuple(
            Sent(index=i, tokens=a.tokens, logprobs=a.logprobs, states=a.states, cheated=bool(c))
            for i, a, c in zip(indices, answers, cheated, strict=True)
        )
        return Batch(sent=sent, work=engine.work(prompts, answers), cpu_s=cpu_s)


def _load(path: Path) -> Batch | None:
    if not path.exists():
        return None
    batch: Batch = torch.load(path, weights_only=False)  # our own file
    return batch
