"""Does every client end with the right bytes, whoever dies and whenever?

An origin, two relays and two clients as processes; at seeded random moments one of them is killed (SIGKILL) and started
again with the same command. Each round broadcasts a new version; at its end each client must hold exactly its bytes,
no store, the origin's and the relays' included, may hold anything half-done, and no journal may show that a verified
shard was written twice.

    python -m tests.shardcast_kills --kills 50 --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.shardcast_processes import Process, free_port, visible

CLIENT_MB_S = 2.0  # slow enough that a kill lands in the middle (a burst of twice as much goes first)
WAIT_S = 180.0
SETTLE_S = 30.0


@dataclass
class Figures:
    """What happened."""

    kills: dict[str, int] = field(default_factory=dict)
    in_the_middle: int = 0  # kills while the victim had an unfinished version
    rounds: int = 0
    clients_right: int = 0
    left_over: list[str] = field(default_factory=list)
    fetched_again: int = 0  # shards verified twice by one store under one version
    resumed: int = 0  # versions that a process went on with after a kill


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(kills: int, seed: int, size_mb: float, folder: Path) -> Figures:
    rng, figures = random.Random(seed), Figures()
    key, content = folder / "key", folder / "model.bin"
    ports = {name: free_port() for name in ("origin", "relay0", "relay1")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    write(content, rng, size_mb)

    def start(name: str) -> Process:
        common = ("--store", folder / name, "--journal", folder / f"{name}.jsonl")
        if name == "origin":
            return Process(
                folder / f"{name}.log", "origin", content, "--run", "kills", "--key", key, "--port", ports[name],
                "--shard-mb", 0.5, "--client-mb-s", CLIENT_MB_S, *common,
            )  # fmt: skip
        trusted = ("--origin-key", f"{key}.pub", "--connections", 4, "--stall-s", 3)
        if name.startswith("relay"):
            more = ("--port", ports[name], "--client-mb-s", CLIENT_MB_S)
            return Process(folder / f"{name}.log", "relay", urls["origin"], *trusted, *more, *common)
        return Process(
            folder / f"{name}.log", "pull", urls["relay0"], urls["relay1"], *trusted, "--follow", *common
        )  # fmt: skip

    nodes = {"origin": start("origin")}
    nodes["origin"].wait_for("version 1 is out")
    try:
        for name in ("relay0", "relay1", "client0", "client1"):
            nodes[name] = start(name)
        while sum(figures.kills.values()) < kills:
            figures.rounds += 1
            if rng.random() < 0.8:  # mostly while the version is on its way, sometimes while the origin comes up
                wait_for_transfers(folder)
            for _ in range(rng.randint(3, 5)):
                time.sleep(rng.uniform(0.1, 2.5))
                victim = rng.choice(sorted(nodes))
                figures.in_the_middle += any(p.name.startswith(".partial") for p in store_entries(folder / victim))
                nodes[victim].kill()
                figures.kills[victim] = figures.kills.get(victim, 0) + 1
                time.sleep(rng.uniform(0.0, 1.0))
                nodes[victim].start()
            settle(folder, nodes, content, figures)
            write(content, rng, size_mb)  # the next version: the origin finds it when it is started again
            nodes["origin"].kill()
            nodes["origin"].start()
    finally:
        for node in nodes.values():
            node.kill()
    read_journals(folder, figures)
    return figures


def write(path: Path, rng: random.Random, size_mb: float) -> None:
    hidden = path.with_suffix(".new")
    hidden.write_bytes(rng.randbytes(round(size_mb * 1e6)))
    hidden.replace(path)


def store_entries(store: Path) -> list[Path]:
    return list(store.iterdir()) if store.is_dir() else []


def wait_for_transfers(folder: Path) -> None:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if any(p.name.startswith(".partial") for name in ("client0", "client1") for p in store_entries(folder / name)):
            return
        time.sleep(0.05)


def settle(folder: Path, nodes: dict[str, Process], content: Path, figures: Figures) -> None:
    """Wait until both clients show the newest content; then nothing else may be in any store."""
    expected = sha256(content)
    until = time.monotonic() + WAIT_S
    for name in ("client0", "client1"):
        newest = folder / name / "newest" / content.name
        while True:
            if newest.exists() and sha256(newest) == expected:
                figures.clients_right += 1
                break
            if time.monotonic() > until:
                raise SystemExit(f"{name} has not the right bytes after {WAIT_S:g} s:\n{nodes[name].text[-2000:]}")
            time.sleep(0.1)
    # a relay may need a moment more than the clients; then nothing half-done may be in any store
    until = time.monotonic() + SETTLE_S
    while (left := [entry for name in nodes for entry in half_done(folder, name)]) and time.monotonic() < until:
        time.sleep(0.2)
    figures.left_over += left


def half_done(folder: Path, name: str) -> list[str]:
    return [f"{name}/{entry}" for entry in visible(folder / name) if entry.startswith(".")]


def read_journals(folder: Path, figures: Figures) -> None:
    for path in folder.glob("*.jsonl"):
        seen: set[tuple[str, int]] = set()
        for line in path.read_text().splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:  # the process was killed in the middle of a line
                continue
            if event["kind"] == "shard":
                key = (event["version_id"], event["index"])
                figures.fetched_again += key in seen
                seen.add(key)
            figures.resumed += event["kind"] == "resumed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size-mb", type=float, default=40.0)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        figures = run(options.kills, options.seed, options.size_mb, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps({"seed": options.seed, "size_mb": options.size_mb, **figures.__dict__}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
