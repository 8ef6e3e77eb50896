"""The loss beside TRL's own code, on fresh random tensors. Runs where TRL is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.test_grpo_loss import ours_on

pytestmark = pytest.mark.peer
pytest.importorskip("trl", reason="TRL is not a dependency: pip install trl==1.16.0 to run this comparison")

spec = importlib.util.spec_from_file_location(
    "make_trl_vectors", Path(__file__).parent / "data" / "grpo" / "make_trl_vectors.py"
)
assert spec is not None and spec.loader is not None
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)


@pytest.mark.parametrize("seed", [101, 102, 103])
@pytest.mark.parametrize("name", list(maker.CASES))
def test_equal_to_trl(name: str, seed: int) -> None:
    case = maker.make_case(name, seed)
    loss, grad_logprob, grad_entropy = maker.trl_loss(case)
    case["delta"] = np.inf if case["delta"] is None else case["delta"]
    ours = ours_on({key: np.asarray(value) for key, value in case.items()})
    assert ours[0] == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(ours[1], grad_logprob, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours[2], grad_entropy, rtol=0, atol=1e-6)
