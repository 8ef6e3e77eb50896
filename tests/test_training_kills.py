"""The short form of `python -m tests.training_kills`: somebody dies, and the run ends as if nobody had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training_kills import run


@pytest.mark.slow
def test_two_kills_of_real_processes_cost_time_and_nothing_else(tmp_path: Path) -> None:
    figures = run(kills=2, seed=3, steps=8, folder=tmp_path)
    assert figures.kills.total() == 2
    assert figures.broken == []
