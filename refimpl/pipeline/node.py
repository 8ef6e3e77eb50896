"""One node of a ring as a process: what `launch.py` starts on every machine.

    python -m refimpl.pipeline.node        the first line of its input is the JSON that `__main__.py` prepares

(An argument would do for short prompts only: Linux takes 128 KiB.) It imports what a stage needs and no more: no
tokenizer, no planner, and what is compiled (with its compiler, 130 MB) only where hops are signed or tokens drawn at
random. Its heap gives large tensors back as soon as they are freed, and code that only the imports ran is given back
before the weights come. What a process takes beyond its weights, caches and activations is then little
(`experiments/pipeline/memory.md`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from refimpl.identity import Identity
from refimpl.pipeline.compute import torch_parts
from refimpl.pipeline.head import Head
from refimpl.pipeline.requests import RequestLog
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.stage import Stage, StageConfig
from refimpl.pipeline.tune import tuned
from refimpl.threads import set_threads
from refimpl.world import Signal, World
from refimpl.worlds.asyncio_node import Line
from refimpl.worlds.process import run_process

CLEAN = (b"Anonymous:", b"Private_Dirty:", b"Swap:")  # smaps: 0 kB where no page was written to
MADV_DONTNEED = 4  # sys/mman.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h


def lean_heap() -> None:
    """Have glibc map every tensor of 1 MiB or more by itself, so that it goes back to the system when it is freed. Left
    alone, it raises that limit as large tensors come and go, and keeps their room in one arena per thread: some 60 MB
    of activations that nobody uses. Smaller ones, all of a decode pass, stay in the heap. Elsewhere: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 1 << 20)
        mallopt(M_TRIM_THRESHOLD, 2 << 20)


def lean_code() -> None:
    """Unmap the pages of the libraries' code: what is still run comes back from the system's file cache at its next
    call. Importing torch maps some 65 MB of it, a first product brings 15 back. Only code that was never written to (no
    anonymous, dirty or swapped pages), for the rest would be lost. Elsewhere than on Linux, or where the system does
    not say what is mapped: nothing, for a stage needs none of this."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if madvise is None:
        return
    with contextlib.suppress(OSError, ValueError):
        for start, size in untouched_code(Path("/proc/self/smaps").read_bytes()):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_DONTNEED)


def untouched_code(smaps: bytes) -> list[tuple[int, int]]:
    """(start, size) of the areas of `smaps` (proc(5)) that are a file's code and hold nothing but what the file says.
    Bytes, for a path may be in any encoding."""
    areas: list[tuple[int, int]] = []
    area, unproven = (0, 0), set[bytes]()  # of `CLEAN`, what this area has not said yet
    for line in smaps.splitlines():
        words = line.split()
        if not words:
            continue
        if not words[0].endswith(b":"):  # "7f00-7f20 r-xp 00000000 08:01 1234 /usr/lib/libc.so.6"
            code = len(words) > 5 and words[1] == b"r-xp" and words[5].startswith(b"/")
            start, end = (int(edge, 16) for edge in words[0].split(b"-"))
            area, unproven = (start, end - start), set(CLEAN) if code else set()
        elif words[0] in unproven and words[1] == b"0":
            unproven.remove(words[0])
            if not unproven:
                areas.append(area)
    return areas


def run_node(config: dict[str, Any]) -> int:
    """One node's process."""
    lean_heap()
    lean_code()
    node = config["node"]
    if node["threads"]:
        torch.set_num_threads(node["threads"])
    else:
        set_threads(config["here"])
    line = Line(
        latency_ms=node["latency_ms"], uplink_mbit_s=node["uplink_mbit_s"], downlink_mbit_s=node["downlink_mbit_s"]
    )

    identity, keys = Identity.generate(), dict[str, str]()

    async def part(world: World, stop: Signal) -> None:
        parts = torch_parts(config["model"], dtype=config["dtype"])
        memory_bytes = int(node["memory_gb"] * 1e9)
        stage = Stage(world, StageConfig(memory_bytes=memory_bytes), identity, parts)
        if world.name == config["names"][0]:
            await run_head(world, stage, config, keys, stop)
        else:
            stage.serve()
            world.spawn(stage.run(), "stage")
            await stop.wait()
            stage.stop()

    return run_process(
        node["name"],
        part,
        run_seed=config["run_seed"],
        line=line,
        host=node["host"],
        latency_ms_max=config["latency_ms_max"],
        words={"public_key": identity.public_key},
        keys=keys,
    )


async def run_head(world: World, stage: Stage, config: dict[str, Any], keys: Mapping[str, str], stop: Signal) -> None:
    """The head: form the ring, answer the requests of the configuration, say them, and serve until told to stop. What
    cannot be answered is said, as a sentence: {"error": ...}."""
    try:
        await _answer(world, stage, config, keys, stop)
    except ValueError as error:
        print(json.dumps({"error": str(error)}), flush=True)


async def _answer(world: World, stage: Stage, config: dict[str, Any], keys: Mapping[str, str], stop: Signal) -> None:
    ring = {
        **config["ring"],
        "cuts": tuple(config["ring"]["cuts"]),
        "stop_tokens": frozenset(config["ring"]["stop_tokens"]),
    }
    nodes = {name: keys[name] for name in config["names"]}
    given, picked = RingConfig(**(ring | {"micro_batches": ring["micro_batches"] or 1})), None
    if ring["micro_batches"] is None:
        given, picked = await tuned(world, stage, given, nodes, min(given.rows, len(config["requests"])))
    head = Head(world, given, stage, nodes, RequestLog(config["record"]))
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
        "picked": picked,
    }
    print(json.dumps(result), flush=True)
    await stop.wait()
    head.stop()


if __name__ == "__main__":
    sys.exit(run_node(json.loads(sys.stdin.readline())))  # nothing else is sent before it listens
