"""One node of a ring as a process: what `launch.py` starts on every machine.

    python -m refimpl.pipeline.node CONFIGURATION        base64 of the JSON that `__main__.py` prepares

It imports what a stage needs and no more: no tokenizer, no planner, and what is compiled (with its compiler, 130 MB)
only where hops are signed or tokens drawn at random. Its heap gives large tensors back as soon as they are freed. What
a process takes beyond its weights, caches and activations is then little (`experiments/pipeline/memory.md`).
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from typing import Any

import torch

from refimpl.identity import Identity
from refimpl.pipeline.compute import torch_parts
from refimpl.pipeline.head import Head
from refimpl.pipeline.requests import RequestLog
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.stage import Stage, StageConfig
from refimpl.threads import set_threads
from refimpl.world import Signal, World
from refimpl.worlds.asyncio_node import Line
from refimpl.worlds.process import run_process

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h


def lean_heap() -> None:
    """Have glibc map every tensor of 1 MiB or more by itself, so that it goes back to the system when it is freed. Left
    alone, it raises that limit as large tensors come and go, and keeps their room in one arena per thread: some 60 MB
    of activations that nobody uses. Smaller ones, all of a decode pass, stay in the heap. Elsewhere: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 1 << 20)
        mallopt(M_TRIM_THRESHOLD, 2 << 20)


def run_node(config: dict[str, Any]) -> int:
    """One node's process."""
    lean_heap()
    node = config["node"]
    if node["threads"]:
        torch.set_num_threads(node["threads"])
    else:
        set_threads(config["here"])
    line = Line(
        latency_ms=node["latency_ms"], uplink_mbit_s=node["uplink_mbit_s"], downlink_mbit_s=node["downlink_mbit_s"]
    )

    async def part(world: World, stop: Signal) -> None:
        identity = Identity.from_seed(config["run_seed"], world.name)
        parts = torch_parts(config["model"], dtype=config["dtype"])
        memory_bytes = int(node["memory_gb"] * 1e9)
        stage = Stage(world, StageConfig(memory_bytes=memory_bytes), identity, parts)
        if world.name == config["names"][0]:
            await run_head(world, stage, config, stop)
        else:
            stage.serve()
            world.spawn(stage.run(), "stage")
            await stop.wait()
            stage.stop()

    return run_process(node["name"], part, run_seed=config["run_seed"], line=line, host=node["host"])


async def run_head(world: World, stage: Stage, config: dict[str, Any], stop: Signal) -> None:
    """The head: form the ring, answer the requests of the configuration, say them, and serve until told to stop."""
    ring = {
        **config["ring"],
        "cuts": tuple(config["ring"]["cuts"]),
        "stop_tokens": frozenset(config["ring"]["stop_tokens"]),
    }
    nodes = {name: Identity.from_seed(config["run_seed"], name).public_key for name in config["names"]}
    head = Head(world, RingConfig(**ring), stage, nodes, RequestLog(config["record"]))
    head.serve()
    world.spawn(head.run(), "head")
    while not head.ring.up:
        await world.sleep(0.05)
    print(json.dumps({"up": head.ring.epoch}), flush=True)
    began_s = world.now()
    asked = config["requests"]
    kept = await head.complete(
        [r["id"] for r in asked], [r["prompt"] for r in asked], [r["new"] for r in asked], [r["seed"] for r in asked]
    )
    seconds = world.now() - began_s
    counters = await head.ring.counters()
    result = {
        "answers": [request.answer for request in kept],
        "seconds": seconds,
        "epoch": head.ring.epoch,
        "tau_s": [c.busy_s / max(1, c.computed) if c is not None else None for c in counters],
        "cycle_s": head.cycle_s(),
    }
    print(json.dumps(result), flush=True)
    await stop.wait()
    head.stop()


if __name__ == "__main__":
    sys.exit(run_node(json.loads(base64.b64decode(sys.argv[1]))))
