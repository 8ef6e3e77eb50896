"""`python -m refimpl.node CONFIG.json`: one node of a swarm as a process, over HTTP.

CONFIG.json holds name, role, behaviour, journal (a file, which is added to: it outlives the process), processes (that
share this machine), the swarm's plan, and may hold line (uplink_mbit_s, downlink_mbit_s, latency_ms), for a line that
nobody else shapes. `refimpl/worlds/process.py` says how a parent starts and stops it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from refimpl.engine import set_threads
from refimpl.swarm import RealEngines, Seat, SwarmPlan, take_seat
from refimpl.testnet.ledger import LedgerRules
from refimpl.workshop import Agreement
from refimpl.world import Signal
from refimpl.worlds.asyncio_node import Line
from refimpl.worlds.http import HttpWorld
from refimpl.worlds.process import run_process


def plan_from_json(fields: dict[str, Any]) -> SwarmPlan:
    """The inverse of `dataclasses.asdict(plan)`."""
    return SwarmPlan(
        **{**fields, "agreement": Agreement(**fields["agreement"]), "rules": LedgerRules(**fields["rules"])}
    )


def warm_up(engines: RealEngines, role: str, behaviour: str) -> None:
    """Load what the role needs, and use it once: a process's first pass takes seconds of set-up that later ones do not,
    and they belong before the clock starts."""
    prompts = [engines.prompt_of(0)]
    if role == "worker":
        engines.worker_engine(behaviour).answer(prompts, [0])
    elif role == "validator":
        answers = engines.worker_engine("honest").answer(prompts, [0])
        engines.engine(engines.decoder()).replay(prompts, [answer.tokens for answer in answers])


def main(arguments: list[str]) -> int:
    """Exit code 0: the node's part is done; 1: a task failed; 2: usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    config = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    set_threads(config["processes"])
    plan = plan_from_json(config["plan"])
    engines = RealEngines(plan.agreement)
    warm_up(engines, config["role"], config["behaviour"])

    with Path(config["journal"]).open("a", encoding="utf-8") as lines:

        async def part(world: HttpWorld, stop: Signal) -> None:
            def journal(kind: str, /, **values: Any) -> None:
                record = {"t_ns": round(world.elapsed_s() * 1e9), "kind": kind, "node": world.name, **values}
                lines.write(json.dumps(record, separators=(",", ":")) + "\n")
                lines.flush()

            def computed(work: str, start_s: float, end_s: float) -> None:
                journal("compute", work=work, start_ns=round(start_s * 1e9), end_ns=round(end_s * 1e9))

            world.computed = computed
            seat = Seat(
                world=world, plan=plan, engines=engines, stop=stop, behaviour=config["behaviour"], journal=journal
            )
            await take_seat(config["role"], seat)

        return run_process(config["name"], part, run_seed=plan.run_seed, line=Line(**config.get("line", {})))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
