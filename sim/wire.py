"""`python -m sim.wire CONFIG.json`: the scenario's network as a process between real nodes (`refimpl/worlds/wire.py`).

The paths, delays, losses, jitter, reach and faults are those of the simulator's own `Network`: the same object decides
them in both worlds. What is real here is the passing of time, the bytes, and how flows share a line.

CONFIG.json holds scenario, seed and log (a file for the calls).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import refimpl.shardcast.messages  # noqa: F401 - so that its messages are known by name
from refimpl.messages import carries_bulk
from refimpl.world import derive_rng
from refimpl.worlds.wire import Passage, run_wire
from sim.fabric import build_network, members_by_name
from sim.flows import warm_up
from sim.scenario import Scenario


class ScenarioRules:
    """`refimpl.worlds.wire.Rules` of one scenario. A source's chance is its own, whatever else happens."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.network = build_network(scenario)
        self.numbers = {member.name: number for number, member in enumerate(members_by_name(scenario))}
        self._rngs: dict[str, np.random.Generator] = {name: derive_rng(seed, "network", name) for name in self.numbers}

    def refusal(self, source: str, target: str) -> str | None:
        for name in (source, target):
            if name not in self.numbers:
                return f"there is no node {name!r}"
        return self.network.unreachable(self.numbers[source], self.numbers[target])

    def passage(self, source: str, target: str, kind: str, size_bytes: int, *, reply: bool) -> Passage:
        path = self.network.path(self.numbers[source], self.numbers[target], reply=reply)
        rng = self._rngs[source]
        delay_s = self.network.sample_delay_s(path, rng, size_bytes)
        fate = self.network.fate(path, rng)
        delays_s = tuple(delay_s + extra_s for extra_s in fate.extra_delay_s)
        return Passage(path.links, path.rate_bound_bytes_per_s, delays_s, fate.in_order and not carries_bulk(kind))

    def reset_s(self, source: str, target: str) -> float:
        return self.network.path(self.numbers[source], self.numbers[target], reply=True).one_way_latency_s

    def rate_bytes_per_s(self, link: int) -> float:
        return self.network.engine.capacity(link)

    def order(self, order: dict[str, Any], now_s: float) -> None:
        """{"fault": its place in the scenario, "begins": whether}."""
        place, begins = order["fault"], order["begins"]
        fault = self.scenario.faults[place]
        for name, on in fault.on_network({name: self.numbers[name] for name in self.scenario.struck(fault)}):
            if begins:
                self.network.apply(now_s, f"fault {place} {name}", on)
            else:
                self.network.lift(now_s, f"fault {place} {name}")


def main(arguments: list[str]) -> int:
    """Exit code 0: told to stop; 2: usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    config = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    warm_up(lambda line: None)  # else the first fault on a line would stop all traffic while its solver is loaded
    rules = ScenarioRules(Scenario.model_validate(config["scenario"]), config["seed"])
    with Path(config["log"]).open("w", encoding="utf-8") as log:
        return run_wire(rules, log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
