"""The stand-in engine of large runs: verdicts by the real rule from measured scores, and by measured words."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from refimpl.messages import Submission
from refimpl.toploc.check import PRESETS, ChunkScore
from sim.calibrated import CalibratedChecker, Seen


def verdict(seen: Seen, thresholds: str = "paper") -> tuple[bool, str]:
    checker = CalibratedChecker.__new__(CalibratedChecker)
    checker.engines = SimpleNamespace(table={"cheat": (seen,)})  # type: ignore[assignment]
    checker.thresholds = PRESETS[thresholds]
    none = np.zeros(0, np.float32)
    (outcome,) = checker.check([[]], [Submission("", 0, 1, 0, 0, "", none.astype(np.int32), none, (b"m|cheat|7|x",))])
    return outcome.accepted, outcome.code


def chunk(mismatches: int) -> ChunkScore:
    return ChunkScore(exponent_mismatches=mismatches, mantissa_mean=1.0, mantissa_median=1.0, values=128)


def test_scores_are_judged_by_the_thresholds_in_force() -> None:
    assert verdict(Seen("mismatch", (chunk(50),))) == (False, "mismatch")
    assert verdict(Seen("mismatch", (chunk(50),)), "deployed") == (True, "accepted")
    assert verdict(Seen("ok", (chunk(2),))) == (True, "accepted")


def test_what_was_rejected_for_another_reason_than_its_scores_stays_rejected() -> None:
    assert verdict(Seen("wrong_seed", (chunk(2),))) == (False, "wrong_seed")
