"""Starts a ring's processes, on this machine or on several, and stops them: the parent's side.

Each node is `python -m refimpl.pipeline.node`, which reads its configuration from its input, and then what
`refimpl/worlds/process.py` says. On another machine it is started through a command that ends in a shell there, such as
`ssh host`, given in the node file:

    model = "models/SmolLM2-135M-Instruct"      # a folder on every machine
    dtype = "bfloat16"
    [[node]]
    name = "a"                                  # the first node is the head's
    [[node]]
    name = "b"
    host = "10.0.0.7"                           # where it listens
    command = ["ssh", "10.0.0.7", "cd armillary &&"]
    python = ".venv/bin/python"
    memory_gb = 24.0                            # for weights and caches
    layer_ms = 0.8                              # one micro-batch through one layer
    latency_ms = 0.0                            # added one way to whatever it sends and receives
    uplink_mbit_s = 100.0                       # its line is slowed down to this
    threads = 8
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from refimpl.model.config import ModelConfig
from refimpl.pipeline.partition import Chain, Device, Links, Objective, Partition, chain_of, partition

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""A tunable of a child's glibc: its heap, with Python's objects in it, in huge pages. A stage sleeps between passes,
and on a virtual machine each page of 4 kB that it then touches costs microseconds; a pass touches thousands."""

STOP_S = 20.0
"""A child that is told to stop and lives so long after is killed."""


class LaunchError(Exception):
    """The ring could not be started, or a node failed. Takes exactly one argument: the sentence."""


@dataclass(frozen=True, kw_only=True)
class NodeEntry:
    """One node of a node file."""

    name: str
    host: str = "127.0.0.1"
    command: tuple[str, ...] = ()  # before the python command; empty: this machine
    python: str = sys.executable
    memory_gb: float = 1e6
    layer_ms: float = 1.0
    threads: int = 0  # 0: this machine's cores, divided by its processes
    latency_ms: float = 0.0  # added one way to whatever this node sends or receives
    uplink_mbit_s: float | None = None
    downlink_mbit_s: float | None = None
    spare: bool = False  # not seated at first


@dataclass(frozen=True, kw_only=True)
class NodeFile:
    """A ring's nodes and what they run."""

    model: str
    nodes: tuple[NodeEntry, ...]
    dtype: str = "bfloat16"

    @staticmethod
    def read(path: str | Path) -> NodeFile:
        """Raises `LaunchError` with the file, the field and what was expected."""
        try:
            raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise LaunchError(f"{path}: {error}") from error
        known = {f.name for f in fields(NodeEntry)}
        entries = []
        for entry in raw.pop("node", []):
            unknown = sorted(set(entry) - known)
            if unknown or "name" not in entry:
                raise LaunchError(
                    f"{path}: node {entry.get('name', '?')!r}: unknown {unknown} or no name; known: {sorted(known)}"
                )
            if "command" in entry:
                entry["command"] = tuple(entry["command"])
            entries.append(NodeEntry(**entry))
        unknown = sorted(set(raw) - {"model", "dtype"})
        if unknown or "model" not in raw or not entries:
            raise LaunchError(f"{path}: expected model, dtype and at least one [[node]]; unknown: {unknown}")
        return NodeFile(model=raw["model"], dtype=raw.get("dtype", "bfloat16"), nodes=tuple(entries))


def cut(
    config: ModelConfig,
    nodes: Sequence[NodeEntry],
    *,
    rows: int,
    micro_batches: int,
    capacity_tokens: int,
    dtype: str,
    objective: Objective,
) -> Partition:
    """Which node holds which layers, in the order of the nodes, some of which may be left out: the least cycle of so
    many micro-batches of `rows` sequences over the nodes' lines, or the least latency of one token. Raises `NoCut`."""
    width = 2 if dtype == "bfloat16" else 4
    size = config.size(bytes_per_weight=float(width))
    chain: Chain = chain_of(size, rows * micro_batches, capacity_tokens, tied=config.tied_head)
    devices = [Device(name=n.name, memory_bytes=n.memory_gb * 1e9, layer_s=n.layer_ms / 1e3) for n in nodes]
    links = links_of(nodes, rows * config.hidden * width)
    return partition(chain, devices, links, objective=objective, micro_batches=micro_batches, order="given")


def even_cut(config: ModelConfig, nodes: Sequence[NodeEntry]) -> list[int]:
    """Where the stages end when as many nodes as there are layers for have a stage each, equal within one layer."""
    stages = min(len(nodes), config.layers)
    return [config.layers * (at + 1) // stages for at in range(stages)]


def links_of(nodes: Sequence[NodeEntry], hop_bytes: int) -> Links:
    """Every pair of nodes: the latency of both lines, and how long one hop's activations occupy the slower of them."""
    latency_s = np.array([[(a.latency_ms + b.latency_ms) / 1e3 for b in nodes] for a in nodes])
    rates = [[min(a.uplink_mbit_s or math.inf, b.downlink_mbit_s or math.inf) for b in nodes] for a in nodes]
    return Links(latency_s=latency_s, transfer_s=hop_bytes * 8 / 1e6 / np.array(rates))


@dataclass(slots=True)
class Child:
    """A node's process."""

    entry: NodeEntry
    process: subprocess.Popen[str]
    url: str = ""
    public_key: str = ""  # of the identity that it made when it started
    lines: list[str] = field(default_factory=list)

    def read(self) -> dict[str, Any]:
        """The next thing it says. Raises `LaunchError` when it has ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise LaunchError(f"node {self.entry.name!r} ended with code {self.process.wait()}; its words are above")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise LaunchError(f"node {self.entry.name!r} said {line[:200]!r}, expected a JSON object")
        if "error" in answer:
            raise LaunchError(f"node {self.entry.name!r}: {answer['error']}")
        return answer

    def say(self, order: dict[str, Any]) -> None:
        """Raises `LaunchError` when it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise LaunchError(f"node {self.entry.name!r} hears nothing more: {error}") from error


def start(entry: NodeEntry) -> Child:
    """A node's process. Raises `LaunchError` when its command cannot be run."""
    variables = os.environ | environment(os.environ, sys.platform) if not entry.command else None
    command = [*entry.command, entry.python, "-m", "refimpl.pipeline.node"]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=variables
        )
    except OSError as error:
        raise LaunchError(f"node {entry.name!r}: cannot run {command[0]!r}: {error.strerror}") from error
    return Child(entry, process)


def environment(given: Mapping[str, str], platform: str) -> dict[str, str]:
    """What a child on this machine gets beside `given`: on Linux `HUGE_PAGES`, after the tunables that are set."""
    if platform != "linux":
        return {}
    tunables = [given["GLIBC_TUNABLES"]] if given.get("GLIBC_TUNABLES") else []
    return {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": ":".join([*tunables, HUGE_PAGES])}


@contextlib.contextmanager
def started(entries: Sequence[NodeEntry], configs: Sequence[dict[str, Any]]) -> Iterator[list[Child]]:
    """All nodes' processes, listening and with each other's addresses; stopped at the end, whatever happens."""
    children: list[Child] = []
    try:
        for entry in entries:
            children.append(start(entry))
        for child, config in zip(children, configs, strict=True):
            with contextlib.suppress(LaunchError):  # it has ended: reading says so
                child.say(config)
        for child in children:
            said = child.read()
            child.url, child.public_key = said["url"], said.get("public_key", "")
        keys = {child.entry.name: child.public_key for child in children}
        book = {child.entry.name: child.url for child in children}
        one_machine = not any(entry.command for entry in entries)
        for child in children:
            child.say({"book": book, "keys": keys} | ({"started_s": time.monotonic()} if one_machine else {}))
        yield children
    finally:
        for child in children:
            if child.process.stdin is not None:
                with contextlib.suppress(OSError):
                    child.process.stdin.close()
        for child in children:
            try:
                child.process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            finally:
                if child.process.stdout is not None:
                    child.process.stdout.close()
