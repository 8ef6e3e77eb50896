"""Worlds as the tests want them."""

from __future__ import annotations

from typing import Any

from sim.carrier import FlowCarrier
from sim.network import Network
from sim.world import SimFabric


class _Fabric(SimFabric):
    """A simulated world whose nodes get a line each as they are made: 1 Gbit/s and 1 ms."""

    def __init__(self, run_seed: int) -> None:
        self.network = Network()
        super().__init__(run_seed=run_seed, carrier=lambda kernel: FlowCarrier(kernel, self.network, run_seed))

    def node(self, name: str, *arguments: Any, **options: Any) -> Any:
        world = super().node(name, *arguments, **options)
        if world.index == len(self.network):
            self.network.add_node(uplink_mbit_s=1000.0, downlink_mbit_s=1000.0, latency_ms=1.0)
        return world


def sim_fabric(run_seed: int) -> Any:
    """A fabric for tests of components."""
    return _Fabric(run_seed)
