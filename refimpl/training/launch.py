"""A training run as processes on this machine: one for each node, over HTTP. The parent starts them, watches the
trainer's journal, and stops them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refimpl.threads import set_threads
from refimpl.training.plan import TrainPlan
from refimpl.training.seats import Seat, nodes_of, role_of, take_seat
from refimpl.training.watch import Watched
from refimpl.world import Signal, World
from refimpl.worlds.asyncio_node import Line
from refimpl.worlds.process import run_process

LOOK_S = 0.2
LABELS = {"trainer": "train", "worker": "generate", "validator": "check", "relay": "relay"}


class LaunchError(Exception):
    """The run could not be started, or a node failed. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def run_node(packed: str) -> int:
    """The child's side. Returns the exit code."""
    config = json.loads(base64.b64decode(packed))
    plan = TrainPlan.from_json(config["plan"])
    set_threads(config["processes"])
    folder = Path(config["folder"]) / config["name"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a", encoding="utf-8") as lines:

        async def part(world: World, stop: Signal) -> None:
            def journal(kind: str, /, **values: Any) -> None:
                record = {"t_ns": round(world.now() * 1e9), "kind": kind, "node": world.name, **values}
                lines.write(json.dumps(record, separators=(",", ":")) + "\n")
                lines.flush()

            watched: Any = Watched(world, LABELS[role_of(plan, world.name)], journal)
            await take_seat(Seat(world=watched, plan=plan, folder=folder, stop=stop, journal=journal))
            usage = os.times()
            journal("used", cpu_s=usage.user + usage.system + usage.children_user + usage.children_system)

        return run_process(config["name"], part, run_seed=plan.run_seed, line=Line(**config["line"]))


def run_processes(
    plan: TrainPlan,
    folder: Path,
    *,
    say: Callable[[dict[str, Any]], None],
    line: Line | None = None,
    patience_s: float = 3600.0,
) -> None:
    """Run until the trainer has made all versions. `say` gets its journal, entry by entry. Raises LaunchError."""
    children: dict[str, subprocess.Popen[str]] = {}
    shaped = vars(line or Line())
    told = folder / plan.trainer / "events.jsonl"
    before = told.stat().st_size if told.is_file() else 0  # of a run that is taken up again
    try:
        for name in nodes_of(plan):
            config = {
                "name": name,
                "plan": plan.as_json(),
                "folder": str(folder),
                "line": shaped,
                "processes": 2 + len(plan.workers),
            }
            packed = base64.b64encode(json.dumps(config).encode()).decode()
            command = [sys.executable, "-m", "refimpl.training", "node", packed]
            children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        book = {name: _read(name, child)["url"] for name, child in children.items()}
        order = json.dumps({"book": book, "started_s": time.monotonic()}) + "\n"
        for child in children.values():
            assert child.stdin is not None
            child.stdin.write(order)
            child.stdin.flush()
        _follow(plan, folder, children, say, time.monotonic() + patience_s, before)
    finally:
        for child in children.values():
            if child.stdin is not None:
                with contextlib.suppress(OSError):
                    child.stdin.close()
        for child in children.values():
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()


def _follow(
    plan: TrainPlan,
    folder: Path,
    children: dict[str, subprocess.Popen[str]],
    say: Callable[[dict[str, Any]], None],
    until_s: float,
    at: int,
) -> None:
    path, rest = folder / plan.trainer / "events.jsonl", ""
    while True:
        if path.is_file():
            with path.open("r", encoding="utf-8") as file:
                file.seek(at)
                text = file.read()
                at = file.tell()
            *whole, rest = (rest + text).split("\n")
            for line in whole:
                event = json.loads(line)
                say(event)
                if event["kind"] == "finished":
                    return
        for name, child in children.items():
            code = child.poll()
            if code is not None and (code != 0 or name not in plan.workers):
                raise LaunchError(f"node {name!r} ended with code {code}; its words are above")
        if time.monotonic() > until_s:
            raise LaunchError("the run did not end within its time; the nodes' events.jsonl say who waited for whom")
        time.sleep(LOOK_S)


def _read(name: str, child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise LaunchError(f"node {name!r} ended with code {child.wait()}; its words are above")
    answer: dict[str, Any] = json.loads(line)
    return answer
