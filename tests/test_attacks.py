"""Every behaviour as code against the real parts: what each does to a proof, and who notices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from refimpl.attacks.catalogue import ATTACKS
from refimpl.attacks.cheats import CHEATS
from refimpl.attacks.honest import HONEST
from refimpl.attacks.names import BEHAVIOURS
from refimpl.attacks.names import CHEATS as CHEAT_NAMES
from refimpl.attacks.names import HONEST as HONEST_NAMES
from refimpl.attacks.quantize import perturbed, round_to_bits, without_last_layers
from refimpl.swarm import RealEngines
from refimpl.toploc.check import PRESETS, Verification, verify_proofs
from refimpl.workshop import Agreement
from tests.paths import TINY_MODEL

SEEDS = [101, 102, 103, 104]
PROBLEMS = [3, 14, 15, 92]


@pytest.fixture(scope="module")
def engines() -> RealEngines:
    return RealEngines(Agreement(model_path=str(TINY_MODEL), prompts="toy", batch=4, answer_tokens_max=48))


def prompts(engines: RealEngines) -> list[Sequence[int]]:
    return [engines.prompt_of(problem) for problem in PROBLEMS]


def verdicts(engines: RealEngines, answers: Sequence[Any], mode: str = "strict") -> list[Verification]:
    replays = engines.engine(engines.decoder()).replay(prompts(engines), [answer.tokens for answer in answers])
    return [
        verify_proofs(replay.states, answer.proofs, mode=mode, thresholds=PRESETS["paper"])  # type: ignore[arg-type]
        for replay, answer in zip(replays, answers, strict=True)
    ]


def test_names_are_those_of_the_tables() -> None:
    assert tuple(HONEST) == HONEST_NAMES
    assert set(CHEATS) <= set(CHEAT_NAMES) == set(ATTACKS) - {"outside-top-k"}
    assert len(BEHAVIOURS) == len(set(BEHAVIOURS)) >= 17


@pytest.mark.parametrize("name", HONEST_NAMES)
def test_honest_noise_is_accepted(engines: RealEngines, name: str) -> None:
    answers = engines.worker_engine(name).answer(prompts(engines), SEEDS)
    assert [len(answer.tokens) >= 40 for answer in answers] == [True] * 4
    for verdict in verdicts(engines, answers):
        assert verdict.accepted, verdict.reason


CAUGHT = {
    "layers-skipped": {"mismatch", "drift"},
    "sign-flipped": {"mismatch"},
    "proofs-too-few": {"wrong_count"},
    "proofs-null": {"malformed"},
    "proofs-garbage": {"malformed", "mismatch"},
    "proof-copied": {"mismatch", "drift"},
}


@pytest.mark.parametrize(("name", "codes"), CAUGHT.items())
def test_these_are_caught_every_time_and_for_the_right_reason(engines: RealEngines, name: str, codes: set[str]) -> None:
    for verdict in verdicts(engines, engines.worker_engine(name).answer(prompts(engines), SEEDS)):
        assert not verdict.accepted and verdict.code in codes, verdict.reason


def test_tokens_of_a_cheap_model_read_by_the_right_one_pass_since_v1_cannot_see_how_tokens_were_chosen(
    engines: RealEngines,
) -> None:
    answers = engines.worker_engine("cheap-tokens").answer(prompts(engines), SEEDS)
    honest = engines.worker_engine("honest").answer(prompts(engines), SEEDS)
    assert any(a.tokens.tolist() != h.tokens.tolist() for a, h in zip(answers, honest, strict=True))
    assert all(verdict.accepted for verdict in verdicts(engines, answers))


def test_the_published_verifier_misses_flipped_signs_and_missing_proofs(engines: RealEngines) -> None:
    for name in ("sign-flipped", "proofs-too-few"):
        answers = engines.worker_engine(name).answer(prompts(engines), SEEDS)
        assert all(verdict.accepted for verdict in verdicts(engines, answers, mode="published"))


def test_flipping_the_sign_changes_no_token(engines: RealEngines) -> None:
    flipped = engines.worker_engine("sign-flipped").answer(prompts(engines), SEEDS)
    honest = engines.worker_engine("honest").answer(prompts(engines), SEEDS)
    assert [a.tokens.tolist() for a in flipped] == [a.tokens.tolist() for a in honest]


@pytest.mark.parametrize("name", ["weights-4bit", "weights-8bit", "other-checkpoint", "kv-8bit", "prompt-altered"])
def test_another_computation_moves_the_scores_further_than_honest_noise(engines: RealEngines, name: str) -> None:
    def mean_error(behaviour: str) -> float:
        answers = engines.worker_engine(behaviour).answer(prompts(engines), SEEDS)
        return float(np.mean([s.mantissa_mean for v in verdicts(engines, answers) for s in v.chunks]))

    assert mean_error(name) > 1.2 * mean_error("honest")


def test_rounding_gives_the_nearest_of_symmetric_levels() -> None:
    x = torch.tensor([[-7.0, 3.4, 0.4, 7.0, 0.1, -0.2, 0.0, 0.35]])
    assert round_to_bits(x, bits=4, group=4).tolist() == [
        [-7.0, 3.0, 0.0, 7.0, pytest.approx(0.1), pytest.approx(-0.2), 0.0, pytest.approx(0.35)]
    ]
    assert round_to_bits(x, bits=4, group=None).tolist() == [[-7.0, 3.0, 0.0, 7.0, 0.0, 0.0, 0.0, 0.0]]
    assert round_to_bits(torch.zeros(2, 4), bits=8, group=None).tolist() == [[0.0] * 4] * 2


def test_variants_leave_the_agreed_model_as_it_is(engines: RealEngines) -> None:
    before = {name: value.clone() for name, value in engines.decoder().state_dict().items()}
    for name in CHEAT_NAMES:
        engines.worker_engine(name)
    perturbed(engines.decoder(), relative=0.1, seed=1)
    for name, value in engines.decoder().state_dict().items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(ValueError, match="layers were to be skipped"):
        without_last_layers(engines.decoder(), len(engines.decoder().layers))
