"""Worlds as the tests want them."""

from __future__ import annotations

from typing import Any

from sim.world import SimFabric


class FixedDelay:
    def __init__(self, kernel):
        self.kernel = kernel

    def send(self, source, target, size_bytes, arrived):
        self.kernel.at(target, self.kernel._now + 1_000_000, lambda _: arrived())

    def unreachable(self, source, target):
        return None


def sim_fabric(run_seed: int) -> Any:
    return SimFabric(run_seed=run_seed, carrier=FixedDelay)
