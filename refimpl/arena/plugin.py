"""A pytest plug-in: somebody's own verifier before the arena's attacks.

    pytest -p refimpl.arena.plugin --arena-setting tiny

    from refimpl.arena.verifier import Finding, Verifier

    MINE = Verifier(says="counts commas", check=count_commas, limit=3.0)

    def test_mine(arena):
        arena.accepts_honest(MINE, rate_max=0.05)
        arena.detects(MINE, "weights-4bit", rate_min=0.9)

Both ask the exact 95 % interval: `detects` fails if the whole interval is below `rate_min`, `accepts_honest` if the
whole interval is above `rate_max`. Sequences are made once and kept in pytest's cache folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from refimpl.arena.bench import SETTINGS, Bench
from refimpl.arena.judge import Rate, judge
from refimpl.arena.verifier import Verifier


class Arena:
    """The fixture."""

    def __init__(self, bench: Bench, count: int) -> None:
        self.bench, self.count = bench, count

    def rate(self, verifier: Verifier, behaviour: str) -> Rate:
        """How many of this behaviour's answers the verifier rejects. Made without limits of calibration: its own."""
        if behaviour == "recomputed":
            raise ValueError("recomputed is what verifiers compare with, expected a behaviour")
        cell = judge(self.bench, behaviour, self.count, {}, {"own": verifier})
        return cell.rate("own")

    def detects(self, verifier: Verifier, attack: str, *, rate_min: float) -> Rate:
        """Fails when the verifier surely detects less than that."""
        rate = self.rate(verifier, attack)
        assert rate.interval[1] >= rate_min, f"{attack}: detects {rate} %, expected {100 * rate_min:g} % or more"
        return rate

    def accepts_honest(self, verifier: Verifier, *, rate_max: float, behaviour: str = "honest") -> Rate:
        """Fails when the verifier surely rejects more honest answers than that."""
        rate = self.rate(verifier, behaviour)
        assert rate.interval[0] <= rate_max, f"{behaviour}: rejects {rate} %, expected {100 * rate_max:g} % at most"
        return rate


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("arena", "verifiers before attacks")
    group.addoption("--arena-setting", default="tiny", choices=list(SETTINGS), help="model and task (tiny)")
    group.addoption("--arena-answers", default=40, type=int, help="answers of each behaviour (40)")


@pytest.fixture(scope="session")
def arena(request: pytest.FixtureRequest) -> Arena:
    """Attacks and honest behaviours to hold a verifier against."""
    assert request.config.cache is not None
    folder = Path(str(request.config.cache.mkdir("arena")))
    setting = SETTINGS[request.config.getoption("--arena-setting")]
    return Arena(Bench(setting, folder), request.config.getoption("--arena-answers"))
