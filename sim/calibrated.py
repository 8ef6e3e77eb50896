"""The engine's stand-in for large runs: no model, but lengths and verdict scores as they were measured with one.

A table (`sim/tables/*.json`, made by `experiments/calibrate_scores.py` from runs with the real engine) holds what the
validator saw of each behaviour, submission by submission. A simulated submission draws one of these, by its own seed;
its verdict is then made by the real rule from the drawn scores, so thresholds and forgiveness can be varied here too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from refimpl.messages import Submission
from refimpl.swarm import SwarmPlan
from refimpl.toploc.check import PRESETS, ChunkScore, Verification, judge
from refimpl.work import Forward, ModelSize, Prove, Several, Verify, Work
from sim.model_sizes import MODEL_SIZES, TABLES, known_tables

PROOF_BYTES = 258
CHUNK_TOKENS = 32
PROMPT_TOKENS = 64


class CalibrationMissing(ValueError):
    """No table says what was asked. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


@dataclass(frozen=True)
class Seen:
    """One measured submission: the code it was judged with, and its chunks' scores if proofs were compared."""

    code: str
    chunks: tuple[ChunkScore, ...]


@lru_cache(maxsize=8)
def load_table(name: str) -> dict[str, tuple[Seen, ...]]:
    """Measured submissions per behaviour. Raises CalibrationMissing."""
    if name not in known_tables():
        raise CalibrationMissing(f"there is no table {name!r}; known: {', '.join(known_tables())}")
    raw = json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))
    return {
        behaviour: tuple(
            Seen(
                entry["code"],
                tuple(
                    ChunkScore(exponent_mismatches=m, mantissa_mean=mean, mantissa_median=median, values=128)
                    for m, mean, median in entry["chunks"]
                ),
            )
            for entry in entries
        )
        for behaviour, entries in raw["behaviours"].items()
    }


@dataclass(frozen=True)
class CalibratedAnswer:
    """An answer as it is on the wire: right sizes, and a note in the proofs' place of what to draw."""

    tokens: np.ndarray
    logprobs: np.ndarray
    proofs: tuple[bytes, ...]


class CalibratedEngines:
    """`refimpl.swarm.Engines` without a model. Every node shares it."""

    checkpoint = "calibrated"
    problem_count = 1 << 20

    def __init__(self, *, size: str, table: str, answer_tokens_median: float, answer_tokens_sigma: float) -> None:
        """Answer lengths are log-normal with this median and sigma, cut at the plan's maximum."""
        if size not in MODEL_SIZES:
            raise CalibrationMissing(f"there is no model size {size!r}; known: {', '.join(MODEL_SIZES)}")
        self.size: ModelSize = MODEL_SIZES[size]
        self.table = load_table(table)
        self._prompt = tuple(range(PROMPT_TOKENS))
        self._zeros: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lengths = (answer_tokens_median, answer_tokens_sigma)
        self.answer_tokens_max = 1 << 20

    @property
    def vocabulary(self) -> int:
        return self.size.vocabulary

    def worker_engine(self, behaviour: str) -> CalibratedEngine:
        if behaviour not in self.table:
            raise CalibrationMissing(
                f"the table has nothing measured for {behaviour!r}; it has {', '.join(self.table)}"
            )
        return CalibratedEngine(self, behaviour)

    def checker(self, plan: SwarmPlan) -> CalibratedChecker:
        self.answer_tokens_max = plan.agreement.answer_tokens_max
        return CalibratedChecker(self, plan)

    def prompt_of(self, problem_id: int) -> Sequence[int]:
        return self._prompt

    def length(self, seed: int) -> int:
        """Tokens of the answer that is sampled with `seed`."""
        median, sigma = self._lengths
        draw = np.random.Generator(np.random.PCG64(seed)).standard_normal()
        return min(max(round(median * math.exp(sigma * draw)), 1), self.answer_tokens_max)

    def arrays(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities of `count` tokens; shared, since nobody reads them."""
        if count not in self._zeros:
            self._zeros[count] = (np.zeros(count, np.int32), np.zeros(count, np.float32))
        return self._zeros[count]


class CalibratedEngine:
    """What a worker of one behaviour runs."""

    def __init__(self, engines: CalibratedEngines, behaviour: str) -> None:
        self.engines, self.behaviour = engines, behaviour

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[CalibratedAnswer]:
        answers = []
        for seed in seeds:
            count = self.engines.length(seed)
            note = f"calibrated|{self.behaviour}|{seed}|".encode().ljust(PROOF_BYTES, b"\0")
            answers.append(CalibratedAnswer(*self.engines.arrays(count), (note,) * -(-count // CHUNK_TOKENS)))
        return answers

    def work(self, prompts: Sequence[Sequence[int]], answers: Sequence[CalibratedAnswer]) -> Work:
        made = [len(answer.tokens) for answer in answers]
        size, steps = self.engines.size, max(made)
        alive = max(1, round(sum(made) / steps))
        return Several(
            (
                Forward(model=size, batch=len(made), new_tokens=PROMPT_TOKENS),
                Forward(model=size, batch=alive, new_tokens=1, past_tokens=PROMPT_TOKENS, steps=steps),
                Prove(tokens=sum(made), hidden=size.hidden),
            )
        )


class CalibratedChecker:
    """`refimpl.toploc.validator.Checker` from measured scores and the real rule."""

    def __init__(self, engines: CalibratedEngines, plan: SwarmPlan) -> None:
        self.engines, self.thresholds = engines, PRESETS[plan.thresholds]

    def precheck(self, submission: Submission) -> tuple[str, str] | None:
        seen = self._seen(submission)
        return None if seen.chunks else (seen.code, "as measured")

    def work(self, prompts: Sequence[Sequence[int]], submissions: Sequence[Submission]) -> Work:
        tokens = [PROMPT_TOKENS + len(submission.tokens) for submission in submissions]
        size = self.engines.size
        prefill = Forward(model=size, batch=len(tokens), new_tokens=round(sum(tokens) / len(tokens)))
        return Several((prefill, Verify(tokens=sum(tokens), hidden=size.hidden)))

    def check(self, prompts: Sequence[Sequence[int]], submissions: Sequence[Submission]) -> list[Any]:
        outcomes: list[Verification] = []
        for submission in submissions:
            seen = self._seen(submission)
            outcome = judge(seen.chunks, self.thresholds)
            if outcome.accepted and seen.code not in ("ok", "mismatch", "drift"):  # not for its scores
                outcome = Verification(accepted=False, reason=f"{seen.code}: as measured", chunks=seen.chunks)
            outcomes.append(outcome)
        return outcomes

    def _seen(self, submission: Submission) -> Seen:
        """The measured submission that this one draws: by its behaviour and its sampling seed."""
        _, behaviour, seed, _ = submission.proofs[0].split(b"|", 3)
        measured = self.engines.table[behaviour.decode()]
        return measured[drawn(int(seed), len(measured))]


@lru_cache(maxsize=1 << 12)
def drawn(seed: int, count: int) -> int:
    """Which of `count` measured submissions the answer sampled with `seed` stands for; asked before a check, and in
    it."""
    return int(np.random.Generator(np.random.PCG64([seed, 1])).integers(count))
