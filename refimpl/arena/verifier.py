"""The one interface of a verifier, whatever it looks at.

While answers are written, `commit` turns each chunk of final hidden states into bytes (or there is nothing to commit).
Afterwards `check` is given the bytes and a `Case`: what was claimed, and what the verifier's own model makes of it in
one prefill. It answers with a `Finding`: a score where larger is worse, a verdict and a reason. The arena adds the
cost. A new verifier is one function and one line in `verifiers.VERIFIERS`.

A verdict is True (accepted), False (rejected) or None: nothing can be said. A check that raises is None as well.

Shapes: n tokens of one answer, C tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from refimpl.engine import Replay
from refimpl.model.sampler import Sampling
from refimpl.toploc.one_pass import read_replays
from refimpl.toploc.proof import CHUNK_TOKENS

Needs = Literal["states", "logits", "generation"]
"""What of the verifier's own model a check reads. Each includes what is before it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """What one prefill by the right model says of an answer: everything that the table's verifiers read."""

    states: torch.Tensor  # bf16 [n, D]: the verifier's final hidden states
    margins: np.ndarray  # float64 [n], logits: how far each token is from being the seed's (`toploc.sampling_proof`)
    exposures: np.ndarray  # float64 [n] in [0, 1]: how easily an honest prover errs there
    probabilities: np.ndarray  # float64 [n]: of each token under the right model, at the temperature that was due
    end_probability: float  # that the right model ends at the last token, likewise; NaN without tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One answer as the verifier sees it."""

    tokens: np.ndarray  # int32 [n], claimed
    seed: int  # that was due
    sampling: Sampling  # that was due
    tokens_max: int
    eos_ids: frozenset[int]
    opened: Opened
    recomputed: np.ndarray | None = None  # the verifier's own answer to the same prompt and seed, if it made one
    replay_again: Callable[[], Replay] | None = None  # for checks that want the logits themselves


def open_answers(replays: Sequence[Replay], seeds: Sequence[int], sampling: Sampling) -> list[Opened]:
    """Everything that needs the right model, in one pass over the logits of all these answers."""
    return [
        Opened(
            states=replay.states,
            margins=reading.margins,
            exposures=reading.exposures,
            probabilities=reading.probabilities,
            end_probability=float(reading.end_probabilities[-1]) if len(replay.tokens) else math.nan,
        )
        for replay, reading in zip(replays, read_replays(replays, seeds, sampling), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a verifier says of one answer."""

    score: float  # larger is worse
    verdict: bool | None
    reason: str
    values: np.ndarray | None = None  # what the score is a mean or a maximum of: one for `tokens_per_value` tokens
    cost_s: float = 0.0  # CPU time beside the shared prefill


Commit = Callable[[torch.Tensor], bytes]
"""bf16 states of one chunk [C, D] -> what is sent of them."""

Check = Callable[[Case, Sequence[bytes], float], Finding]
"""(case, its commitments, the limit on the score) -> finding."""


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """A line of the table."""

    says: str
    check: Check
    limit: float  # scores above are rejected, where a setting has no calibrated limit
    commit: Commit | None = None
    needs: Needs = "states"
    calibrated: bool = False  # takes its limit from honest noise
    least: float = 1e-3  # below which no calibration puts the limit
    tokens_per_value: int = 1  # of the findings' values

    def commitments(self, states_nD: torch.Tensor) -> tuple[bytes, ...]:
        """What is sent with an answer: one commitment a chunk."""
        return () if self.commit is None else tuple(self.commit(part) for part in states_nD.split(CHUNK_TOKENS))

    def find(self, case: Case, sent: Sequence[bytes], limit: float | None = None) -> Finding:
        """`check`, timed; never raises for what was sent."""
        began = time.process_time()
        try:
            finding = self.check(case, sent, self.limit if limit is None else limit)
        except Exception as error:  # a check that breaks is nobody's guilt
            finding = Finding(score=math.nan, verdict=None, reason=f"no verdict: {type(error).__name__}: {error}")
        return replace(finding, cost_s=time.process_time() - began)
