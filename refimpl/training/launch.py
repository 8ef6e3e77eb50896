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
from refimpl.training.plain import student_of
from refimpl.training.plan import TrainPlan
from refimpl.training.seats import Seat, nodes_of, role_of, take_seat
from refimpl.training.shards import follow, group
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
        lines.write("\n" if lines.tell() else "")  # what follows a line that was cut off is on one of its own

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


def run_rank(packed: str) -> int:
    """The side of a process that shares the trainer's model. Returns the exit code."""
    config = json.loads(base64.b64decode(packed))
    plan = TrainPlan.from_json(config["plan"])
    set_threads(2 + len(plan.workers))
    with group(config["rank"], config["ranks"], config["port"]) as state:
        follow(student_of(plan, None, state))
    return 0


class Crew:
    """The processes of one run. Any of them may be killed and started again: it takes its part up where its folder says
    it was, and the others hear where it is now."""

    def __init__(self, plan: TrainPlan, folder: Path, line: Line | None = None) -> None:
        self.plan, self.folder, self.line = plan, folder, line or Line()
        self.children: dict[str, subprocess.Popen[str]] = {}
        self.book: dict[str, str] = {}
        self.started_s = 0.0  # the instant at which every node's clock reads 0

    def start_all(self) -> None:
        """Raises LaunchError."""
        for name in nodes_of(self.plan):
            self._spawn(name)
        self.book = {name: _read(name, child)["url"] for name, child in self.children.items()}
        self.started_s = time.monotonic()
        for name in self.children:
            self._order(name, book=self.book, started_s=self.started_s)

    def restart(self, name: str) -> None:
        """A node that was killed is back. Raises LaunchError."""
        self._spawn(name)
        self.book[name] = _read(name, self.children[name])["url"]
        self._order(name, book=self.book, started_s=self.started_s)
        for other in self.children:
            if other != name:
                self._order(other, book={name: self.book[name]})

    def kill(self, name: str) -> None:
        """SIGKILL: no goodbye."""
        self.children[name].kill()
        self.children[name].wait()

    def broken(self) -> str:
        """Who ended that should not have, in a sentence; empty: nobody. Workers may: no more may be wanted of them."""
        for name, child in self.children.items():
            code = child.poll()
            if code is not None and (code != 0 or name not in self.plan.workers):
                return f"node {name!r} ended with code {code}; its words are above"
        return ""

    def stop(self) -> None:
        """End of input first, then the signal that no process can sleep through. Never raises."""
        for child in self.children.values():
            if child.stdin is not None:
                with contextlib.suppress(OSError):
                    child.stdin.close()
        for child in self.children.values():
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def _spawn(self, name: str) -> None:
        config = {
            "name": name,
            "plan": self.plan.as_json(),
            "folder": str(self.folder),
            "line": vars(self.line),
            "processes": 2 + len(self.plan.workers),
        }
        packed = base64.b64encode(json.dumps(config).encode()).decode()
        command = [sys.executable, "-m", "refimpl.training", "node", packed]
        self.children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _order(self, name: str, **order: Any) -> None:
        stdin = self.children[name].stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `broken` says so
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()


class Followed:
    """A journal, read as it grows, from its present end."""

    def __init__(self, path: Path) -> None:
        self.path, self._rest = path, ""
        self._at = path.stat().st_size if path.is_file() else 0  # of a run that is taken up again

    def news(self) -> list[dict[str, Any]]:
        """What was noted since it was asked last. Half a line that a killed node left is passed over."""
        if not self.path.is_file():
            return []
        with self.path.open("r", encoding="utf-8") as file:
            file.seek(self._at)
            text = file.read()
            self._at = file.tell()
        *whole, self._rest = (self._rest + text).split("\n")
        events = []
        for line in whole:
            with contextlib.suppress(ValueError):  # a line that was cut off, or an empty one
                events.append(json.loads(line))
        return events


def run_processes(
    plan: TrainPlan,
    folder: Path,
    *,
    say: Callable[[dict[str, Any]], None],
    line: Line | None = None,
    patience_s: float = 3600.0,
) -> None:
    """Run until the trainer has made all versions. `say` gets its journal, entry by entry. Raises LaunchError."""
    crew, journal = Crew(plan, folder, line), Followed(folder / plan.trainer / "events.jsonl")
    until_s = time.monotonic() + patience_s
    try:
        crew.start_all()
        while True:
            for event in journal.news():
                say(event)
                if event["kind"] == "finished":
                    return
            if broken := crew.broken():
                raise LaunchError(broken)
            if time.monotonic() > until_s:
                raise LaunchError(
                    "the run did not end within its time; the nodes' events.jsonl say who waited for whom"
                )
            time.sleep(LOOK_S)
    finally:
        crew.stop()


def _read(name: str, child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise LaunchError(f"node {name!r} ended with code {child.wait()}; its words are above")
    answer: dict[str, Any] = json.loads(line)
    return answer
