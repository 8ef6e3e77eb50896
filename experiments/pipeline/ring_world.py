"""A small world in virtual time for experiments with rings: uneven devices, uneven lines, drawn from a seed.

What a ring does may depend on who is slow and what overtakes what, so each run gets devices of 0.2 to 20 ms a pass and
lines of 1 to 30 ms, with jitter. The model, the signatures and the proofs are the real ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refimpl.work import Forward, Work
from refimpl.world import derive_rng
from sim.carrier import FlowCarrier
from sim.jitter import Jitter
from sim.network import Network
from sim.world import SimFabric, SimWorld


class UnevenFabric(SimFabric):
    """Every node has a device and a line of its own, drawn from the run's seed."""

    def __init__(self, run_seed: int) -> None:
        self.network = Network()
        super().__init__(
            run_seed=run_seed, carrier=lambda kernel: FlowCarrier(kernel, self.network, derive_rng(run_seed, "network"))
        )

    def node(self, name: str, *arguments: Any, **options: Any) -> SimWorld:
        world = super().node(name, *arguments, **options)
        if world.index == len(self.network):
            rng = derive_rng(self.run_seed, "line", name)
            self.network.add_node(
                uplink_mbit_s=float(rng.choice([20.0, 100.0, 1000.0])),
                downlink_mbit_s=1000.0,
                latency_ms=float(rng.uniform(1.0, 30.0)),
                jitter=Jitter("exponential", (0.004,)),
            )
            pass_s = float(np.exp(rng.uniform(np.log(2e-4), np.log(2e-2))))
            world.price = lambda work: priced(work, pass_s)
        return world


def priced(work: Work, pass_s: float) -> float:
    """Every pass takes the same; loading and checking take nothing."""
    return pass_s if isinstance(work, Forward) else 0.0
