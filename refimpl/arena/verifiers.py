"""The table of verifiers: one function, and one line in `VERIFIERS`.

Checks by proofs of activations, by the seed, by what the right model finds likely, and by doing everything again. Each
returns a score where larger is worse; those marked `calibrated` reject above a limit that honest noise set
(`stats.limit_for`), the others above the figure that was published for them.

What each sends is in `commit`; the sampling proofs send nothing, since a seed is due and not claimed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from refimpl.arena.stats import FALSE_POSITIVE_BUDGET
from refimpl.arena.verifier import Case, Check, Finding, Verifier
from refimpl.toploc.anytime import AnytimePlan, log_e_values
from refimpl.toploc.check import PRESETS, ChunkScore, Thresholds, verify_proofs
from refimpl.toploc.likelihood import ShapeLimits, shape_of, shape_test, termination_test
from refimpl.toploc.projection import ProjectionError, decode, encode, project, relative_distances
from refimpl.toploc.proof import CHUNK_TOKENS, TOP_K, Mode, build_proofs
from refimpl.toploc.sampling_proof import CLIP

UNBOUNDED = Thresholds(exponent_mismatches=math.inf, mantissa_mean=math.inf, mantissa_median=math.inf)
MALFORMED = 1e9  # the score of something that is no commitment at all
PROJECTIONS = 8
TOKENS_MIN = 16  # fewer give no verdict on the seed
MEAN_OVER = 64  # tokens, at least, that a mean margin is taken over
SMALLEST = 1e-12  # probability, before a logarithm
FALSE_POSITIVE_RATE = 0.001  # of the anytime test, for one prover over its whole life


# ------------------------------------------------------------------------------------------- activations: TOPLOC
def toploc_commit(states_CD: torch.Tensor) -> bytes:
    """258 bytes a chunk."""
    return _proof(states_CD, "strict")


def toploc_commit_published(states_CD: torch.Tensor) -> bytes:
    """The same as the package chooses its top K: among equal numbers it may choose others. A chunk of fewer than K
    numbers is proven as strict does it; the package cannot."""
    return _proof(states_CD, "published" if states_CD.numel() >= TOP_K else "strict")


def _proof(states_CD: torch.Tensor, mode: Mode) -> bytes:
    (proof,) = build_proofs(states_CD, chunk_tokens=max(1, len(states_CD)), mode=mode)
    return proof.encode()


def toploc(mode: Mode, thresholds: Thresholds) -> Check:
    """TOPLOC v1 as published, or strict: the score is the worst chunk's error over its bound (limit 1)."""

    def check(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
        found = verify_proofs(case.opened.states, sent, mode=mode, thresholds=thresholds)
        bounds = (thresholds.exponent_mismatches, thresholds.mantissa_mean, thresholds.mantissa_median)
        ratios = [
            max(
                c.exponent_mismatches / (bounds[0] * (c.values / 128 if mode == "strict" else 1.0)),
                c.mantissa_mean / bounds[1],
                c.mantissa_median / bounds[2],
            )
            for c in found.chunks
        ]
        score = max(ratios, default=0.0 if found.accepted else MALFORMED)
        if not found.accepted and score <= limit:  # rejected by its form, not by its distance
            score = MALFORMED
        verdict = None if found.undecided else found.accepted
        return Finding(score=score, verdict=verdict, reason=found.reason, values=np.array(ratios))

    return check


def toploc_sequence(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """The same proofs, one statistic for the whole answer: mean distance of all bound values, 128 for a mismatch."""
    found = verify_proofs(case.opened.states, sent, thresholds=UNBOUNDED)
    if not found.accepted:
        return Finding(score=MALFORMED, verdict=None if found.undecided else False, reason=found.reason)
    bound_C = np.array([chunk.values for chunk in found.chunks], dtype=np.float64)
    if not bound_C.sum():
        return Finding(score=0.0, verdict=None, reason="nothing was proven")
    total_C = np.array([total_distance(chunk) for chunk in found.chunks])
    what = "mean distance of bound activations, steps of bf16"
    return judged(float(total_C.sum() / bound_C.sum()), limit, what, total_C / np.maximum(bound_C, 1))


def total_distance(chunk: ChunkScore) -> float:
    """Of all bound values of a chunk, steps of bf16: 128 for a mismatch."""
    matched = chunk.values - chunk.exponent_mismatches
    return 128 * chunk.exponent_mismatches + (chunk.mantissa_mean * matched if matched else 0.0)


# --------------------------------------------------------------------------------------- activations: projection
def projection_commit(states_CD: torch.Tensor) -> bytes:
    """8 + 16 bytes a token, by the chunk."""
    return encode(project(states_CD, PROJECTIONS))


def projection(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """Activation-DiFR: mean relative distance of eight random projections of each token's state."""
    try:
        committed = torch.cat([decode(raw) for raw in sent]) if sent else torch.zeros(0, PROJECTIONS)
        distance_n = relative_distances(committed, project(case.opened.states, PROJECTIONS).cpu())
    except ProjectionError as error:
        return Finding(score=MALFORMED, verdict=False, reason=f"malformed: {error}")
    mean = float(distance_n.mean()) if len(distance_n) else 0.0
    return judged(mean, limit, "mean relative distance of projections", distance_n.numpy())


# ------------------------------------------------------------------------------------------------------ the seed
def clipped_margins(case: Case) -> np.ndarray:
    """float64 [n] in [0, 0.5] logits."""
    return np.clip(case.opened.margins, 0.0, CLIP)


def sampling_proof(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """Token-DiFR with our noise: mean clipped margin of the answer. A short one counts as `MEAN_OVER` tokens: a single
    near tie is half a logit, and would set the limit that long answers are held to."""
    if len(case.tokens) < TOKENS_MIN:
        return Finding(score=0.0, verdict=None, reason=f"{len(case.tokens)} tokens; a verdict needs {TOKENS_MIN}")
    margins = clipped_margins(case)
    return judged(mean_margin(margins), limit, "mean clipped margin, logits", margins)


def mean_margin(clipped_n: np.ndarray) -> float:
    """The sampling proof's score of an answer, by its clipped margins, logits."""
    return float(clipped_n.sum()) / max(len(clipped_n), MEAN_OVER)


def anytime(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """The betting test on clipped margins; the limit is the honest mean per exposure, and the rate is guaranteed."""
    plan = AnytimePlan(null_mean=limit, value_max=CLIP, false_positive_rate=FALSE_POSITIVE_RATE)
    if not len(case.tokens):
        return Finding(score=0.0, verdict=None, reason="no tokens")
    evidence = log_e_values(clipped_margins(case), plan, np.clip(case.opened.exposures, 0.0, 1.0))[0]
    score = float(evidence.max())
    reached = np.flatnonzero(evidence >= plan.threshold)
    sentence = f"log e-value {score:.2f} of {plan.threshold:.2f}"
    if len(reached):
        return Finding(score=score, verdict=False, reason=f"{sentence}, reached at token {reached[0] + 1}")
    return Finding(score=score, verdict=True, reason=sentence)


def exact_match(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """Share of tokens that are not the seed's."""
    if len(case.tokens) < TOKENS_MIN:
        return Finding(score=0.0, verdict=None, reason=f"{len(case.tokens)} tokens; a verdict needs {TOKENS_MIN}")
    return judged(float((case.opened.margins > 0).mean()), limit, "share of tokens that the seed does not give")


def recompute(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """Proof of sampling: everything once more. The first token that differs must have been a near tie."""
    if case.recomputed is None:
        return Finding(score=0.0, verdict=None, reason="not drawn by lot")
    shared = min(len(case.tokens), len(case.recomputed))
    differs = np.flatnonzero(case.tokens[:shared] != case.recomputed[:shared])
    if not len(differs):
        same = len(case.tokens) == len(case.recomputed)
        return Finding(score=0.0 if same else math.inf, verdict=same, reason="equal" if same else "another length")
    first = int(differs[0])
    return judged(
        min(float(case.opened.margins[first]), MALFORMED), limit, f"margin at token {first}, the first that differs"
    )


# ---------------------------------------------------------------------------------------------------- likelihood
def shape(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """The sampling-shape test of the INTELLECT-2 validator, with GRAIL's figures: 1 − median probability."""
    verdict, reason = shape_test(case.opened.probabilities, ShapeLimits())
    score = 1.0 - shape_of(case.opened.probabilities).median
    return Finding(score=score, verdict=verdict, reason=reason)


def termination(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """Ends at the length limit, or by an end token that was likely enough: 1 − its probability."""
    verdict, reason = termination_test(
        case.tokens.tolist(), case.eos_ids, case.opened.end_probability, case.tokens_max, 1.0 - limit
    )
    return Finding(
        score=0.0 if len(case.tokens) == case.tokens_max else 1.0 - case.opened.end_probability,
        verdict=verdict,
        reason=reason,
    )


def shape_calibrated(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """By how much tokens are less likely than the model's own draws at the same places, whatever its certainty.

    A draw from p has the probability Σ p² on average, which is 1 less the exposure h; so the mean of (1 - h) - p[y] is
    0 for honest tokens, and its sum over √n is nearly normal: z. Tokens of a second heap near 0 add their whole 1 - h.
    The score is e^z, so that limits, which are log-normal, suit it. The published figures suppose a large, certain
    model.
    """
    seen, count = case.opened, len(case.tokens)
    if count < TOKENS_MIN:
        return Finding(score=1.0, verdict=None, reason=f"{count} tokens; a verdict needs {TOKENS_MIN}")
    z = float((1.0 - seen.exposures - seen.probabilities).sum()) / math.sqrt(count)
    return judged(math.exp(min(z, 20.0)), limit, "e^z of how far token probabilities fall short of the model's draws")


def termination_calibrated(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """An end where no end may be is rejected whatever the limit; an end token by its surprise, -ln p, since one that
    the sampler may draw is drawn now and then."""
    verdict, reason = termination_test(
        case.tokens.tolist(), case.eos_ids, case.opened.end_probability, case.tokens_max, eos_probability_min=-1.0
    )
    if verdict is not True:
        return Finding(score=MALFORMED, verdict=verdict, reason=reason)
    if len(case.tokens) == case.tokens_max:
        return Finding(score=0.0, verdict=True, reason=reason)
    return judged(-math.log(max(case.opened.end_probability, SMALLEST)), limit, "surprise of the end token, nats")


def termination_seed(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
    """An end must also be the seed's: the margin of the last token, which no mean over the answer dilutes."""
    form = termination_calibrated(case, sent, math.inf)
    if form.verdict is not True or len(case.tokens) == case.tokens_max:
        return form
    return judged(min(float(case.opened.margins[-1]), MALFORMED), limit, "margin of the end token, logits")


def judged(score: float, limit: float, what: str, values: np.ndarray | None = None) -> Finding:
    """Rejected above the limit; a score that is not a number is no verdict."""
    if math.isnan(score):
        return Finding(score=score, verdict=None, reason=f"{what} is not a number")
    reason = f"{what} {score:.4g}, at most {limit:.4g}"
    return Finding(score=score, verdict=score <= limit, reason=reason, values=values)


VERIFIERS: dict[str, Verifier] = {
    "toploc-paper": Verifier(
        says="TOPLOC v1 as published, 38/10/8",
        check=toploc("published", PRESETS["paper"]), limit=1.0, commit=toploc_commit_published,
        tokens_per_value=CHUNK_TOKENS,
    ),
    "toploc-deployed": Verifier(
        says="TOPLOC v1 as published, 60/40/40",
        check=toploc("published", PRESETS["deployed"]), limit=1.0, commit=toploc_commit_published,
    ),
    "toploc-strict": Verifier(
        says="TOPLOC, strict rules, 38/10/8",
        check=toploc("strict", PRESETS["paper"]), limit=1.0, commit=toploc_commit,
    ),
    "toploc-sequence": Verifier(
        says="TOPLOC's proofs, one calibrated mean over the answer",
        check=toploc_sequence, limit=3.0, commit=toploc_commit, calibrated=True, tokens_per_value=CHUNK_TOKENS,
    ),
    "projection": Verifier(
        says="eight random projections a token (Activation-DiFR), calibrated mean",
        check=projection, limit=0.05, commit=projection_commit, calibrated=True,
    ),
    "sampling-proof": Verifier(
        says="TOPLOC v2: mean clipped margin (Token-DiFR), calibrated",
        check=sampling_proof, limit=0.02, needs="logits", calibrated=True, least=CLIP / 128,
    ),
    "anytime": Verifier(
        says="TOPLOC v2: betting test on margins, guaranteed false-positive rate",
        check=anytime, limit=0.02, needs="logits", calibrated=True,
    ),
    "exact-match": Verifier(
        says="share of tokens that the seed does not give, at most 10 %",
        check=exact_match, limit=0.10, needs="logits",
    ),
    "shape": Verifier(says="shape of token probabilities, published figures", check=shape, limit=0.80, needs="logits"),
    "termination": Verifier(says="how it ends, published figure", check=termination, limit=0.90, needs="logits"),
    "shape-calibrated": Verifier(
        says="shape of token probabilities, calibrated",
        check=shape_calibrated, limit=4.0, needs="logits", calibrated=True, least=1.5,
    ),
    "termination-calibrated": Verifier(
        says="how it ends, calibrated probability of the end token",
        check=termination_calibrated, limit=5.0, needs="logits", calibrated=True, least=-math.log(0.1),
    ),
    "termination-seed": Verifier(
        says="how it ends, by the seed: margin of the end token",
        check=termination_seed, limit=CLIP, needs="logits", calibrated=True, least=CLIP,
    ),
    "recompute": Verifier(
        says="everything once more (by lot: proof of sampling)", check=recompute, limit=0.5, needs="generation"
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A combination: an answer is drawn with probability `audit_rate`, and then rejected if any member rejects. All
    members share one prefill."""

    members: tuple[str, ...]
    audit_rate: float  # share of all answers that is checked

    @property
    def false_positive_budget(self) -> float | None:
        """Of honest answers that are checked: the members' sum, at most. None where a limit is not calibrated."""
        if not all(VERIFIERS[member].calibrated for member in self.members):
            return None
        return sum(FALSE_POSITIVE_RATE if name == "anytime" else FALSE_POSITIVE_BUDGET for name in self.members)


POLICIES: dict[str, Policy] = {
    "published": Policy(members=("toploc-deployed",), audit_rate=1.0),
    "default": Policy(
        members=(
            "toploc-sequence",
            "projection",
            "sampling-proof",
            "anytime",
            "termination-calibrated",
            "termination-seed",
        ),
        audit_rate=0.1,
    ),
}
