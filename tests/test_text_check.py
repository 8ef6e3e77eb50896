"""What proofs leave open, the text check closes: cut endings, other seeds, a cheap model's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from refimpl.arena.court import CHEAT, sign
from refimpl.messages import Submission
from refimpl.swarm import RealEngines, SwarmPlan, choice_of
from refimpl.toploc.sampling_proof import SamplingLimits
from refimpl.toploc.text_check import TextRules
from refimpl.workshop import Agreement
from tests.paths import TINY_MODEL

AGREEMENT = Agreement(
    model_path=str(TINY_MODEL), prompts="toy", batch=8, answer_tokens_max=48, temperature=2.0, top_p=0.95
)
PLAN = SwarmPlan(run_seed=1, agreement=AGREEMENT, assignments=1, margin_max=0.035, end_probability_min=0.01)


@pytest.fixture(scope="module")
def engines() -> RealEngines:
    return RealEngines(AGREEMENT)


def submissions(engines: RealEngines, behaviour: str) -> tuple[list[Sequence[int]], list[Submission]]:
    """One assignment as a worker of this behaviour answers it."""
    blank: Any = Submission(CHEAT.public_key, 0, 1, 0, 0, engines.checkpoint, None, None, ())  # type: ignore[arg-type]
    choice = choice_of(PLAN, engines.problem_count, blank)
    prompts = [engines.prompt_of(int(problem)) for problem in choice.problem_ids]
    answers = engines.worker_engine(behaviour).answer(prompts, [choice.sampling_seed + i for i in range(8)])
    return prompts, [
        sign(
            Submission(
                CHEAT.public_key,
                0,
                1,
                i,
                int(choice.problem_ids[i]),
                engines.checkpoint,
                a.tokens,
                a.logprobs,
                a.proofs,
            )
        )
        for i, a in enumerate(answers)
    ]


def codes(engines: RealEngines, behaviour: str, plan: SwarmPlan = PLAN) -> list[str]:
    prompts, sent = submissions(engines, behaviour)
    found = engines.checker(plan).check(prompts, sent)
    return ["ok" if outcome.accepted else outcome.code for outcome in found]


@pytest.mark.parametrize("behaviour", ["honest", "honest-fp32", "honest-eager", "honest-split", "honest-batch1"])
def test_honest_text_passes(engines: RealEngines, behaviour: str) -> None:
    assert codes(engines, behaviour) == ["ok"] * 8


@pytest.mark.parametrize(
    ("behaviour", "code", "least"),
    [
        ("cut-early", "bad_ending", 7),
        ("human-text", "wrong_seed", 8),
        ("repeated-text", "wrong_seed", 8),
        ("wrong-seed", "wrong_seed", 4),
        ("best-of-4", "wrong_seed", 2),
    ],
)
def test_what_proofs_accept_the_text_check_names(engines: RealEngines, behaviour: str, code: str, least: int) -> None:
    assert codes(engines, behaviour).count(code) >= least
    blind = SwarmPlan(run_seed=1, agreement=AGREEMENT, assignments=1)
    assert codes(engines, behaviour, blind) == ["ok"] * 8, "the proofs alone see nothing"


def test_a_probability_is_expected() -> None:
    with pytest.raises(ValueError, match="end_probability_min is 1.5"):
        TextRules(
            sampling=AGREEMENT_SAMPLING, tokens_max=8, ends=frozenset({1}), end_probability_min=1.5,
            margins=SamplingLimits(),
        )  # fmt: skip


AGREEMENT_SAMPLING = RealEngines(AGREEMENT).sampling
