"""Is the text itself what the agreed model, seed and rule would have written? What proofs of activations leave open.

Two checks on one prefill, in this order; each may be switched off.

1. *Ending*: an answer ends at the length limit, or by an end token that the model finds likely enough, and nowhere
   else. The INTELLECT-2 validator asks for more than 0.1. Small models end less surely: calibrate, or honest answers
   are rejected.
2. *Seed*: the mean clipped margin of `sampling_proof`, where the assignment decides each answer's seed.

Shapes: n tokens of one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refimpl.model.sampler import Sampling
from refimpl.toploc.likelihood import termination_test
from refimpl.toploc.one_pass import Reading, Replayed, read_replays
from refimpl.toploc.sampling_proof import CLIP, SamplingLimits

BAD_ENDING, WRONG_SEED = "bad_ending", "wrong_seed"


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What is asked of an answer's text."""

    sampling: Sampling
    tokens_max: int
    ends: frozenset[int]
    end_probability_min: float | None = None  # of an end token; None: endings are not looked at
    margins: SamplingLimits | None = None  # None: the seed is not looked at

    def __post_init__(self) -> None:
        if self.end_probability_min is not None and not 0 <= self.end_probability_min < 1:
            raise ValueError(f"end_probability_min is {self.end_probability_min}; expected a probability below 1")

    @property
    def asks(self) -> bool:
        """Whether anything is looked at."""
        return self.end_probability_min is not None or self.margins is not None


def check_texts(replays: Sequence[Replayed], seeds: Sequence[int], rules: TextRules) -> list[tuple[str, str] | None]:
    """For each answer (code, sentence) of what is wrong with it, or None. A probability that is no number, and fewer
    tokens than a verdict needs, convict nobody."""
    readings = read_replays(replays, seeds, rules.sampling)
    return [check_text(replay.tokens.tolist(), one, rules) for replay, one in zip(replays, readings, strict=True)]


def check_text(tokens_n: Sequence[int], reading: Reading, rules: TextRules) -> tuple[str, str] | None:
    """The same for one answer that was read already."""
    if rules.end_probability_min is not None and len(tokens_n):
        likely = float(reading.end_probabilities[-1])
        passed, sentence = termination_test(tokens_n, rules.ends, likely, rules.tokens_max, rules.end_probability_min)
        if passed is False:
            return BAD_ENDING, sentence
    if rules.margins is not None and len(tokens_n) >= rules.margins.tokens_min:
        score = float(np.clip(reading.margins, 0.0, CLIP).mean())
        if score > rules.margins.score_max:
            return WRONG_SEED, f"mean clipped margin {score:.4f} logits; at most {rules.margins.score_max:.4f} may be"
    return None
