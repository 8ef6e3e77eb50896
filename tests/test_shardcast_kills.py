"""Real processes, killed at seeded random moments and started again: whole bytes everywhere, and nothing half-done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shardcast_kills import run


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_every_client_ends_with_the_right_bytes_whoever_is_killed_and_whenever(kills: int, tmp_path: Path) -> None:
    figures = run(kills, seed=1, size_mb=20.0, folder=tmp_path)
    assert sum(figures.kills.values()) >= kills
    assert figures.clients_right == 2 * figures.rounds  # both clients, after every round
    assert figures.left_over == []
    assert figures.fetched_again == 0  # what was verified before a kill is not fetched after it
    assert figures.in_the_middle > 0
