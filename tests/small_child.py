"""A node without a model, for tests of those who start and break nodes: `python -m tests.small_child CONFIG.json`.

A worker ticks: it notes its clock, calls the ledger, and computes for 20 ms, again and again. The others answer.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refimpl.messages import Message, wire
from refimpl.work import Seconds
from refimpl.world import CallError, Signal
from refimpl.worlds.asyncio_node import Line
from refimpl.worlds.http import HttpWorld
from refimpl.worlds.process import run_process


@wire
@dataclass(frozen=True)
class Nudge(Message):
    number: int


async def answer(source: str, message: Nudge) -> Message:
    return message


def main(path: str) -> int:
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    with Path(config["journal"]).open("a", encoding="utf-8") as lines:

        async def part(world: HttpWorld, stop: Signal) -> None:
            def journal(kind: str, **values: Any) -> None:
                record = {"t_ns": round(world.elapsed_s() * 1e9), "kind": kind, "node": world.name, **values}
                lines.write(json.dumps(record) + "\n")
                lines.flush()

            world.serve({Nudge: answer})
            disk = Path(config["disk"]) / "kept"
            journal("began", disk=disk.exists())
            disk.write_text("kept", encoding="utf-8")
            while config["role"] == "worker" and not stop.is_set():
                try:
                    await world.call("ledger", Nudge(1), 2.0)
                    outcome = "reached"
                except CallError as error:
                    outcome = error.reason
                begun_s = time.monotonic()
                await world.compute(Seconds(duration_s=0.02), lambda: time.sleep(0.02))
                journal("tick", clock_s=world.now(), outcome=outcome, computed_s=time.monotonic() - begun_s)
            await stop.wait()

        return run_process(config["name"], part, run_seed=1, line=Line())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
