"""How fast does a file reach four clients over one relay, against the published package, on one machine in one run?

    python experiments/bench/shardcast.py --peer PYTHON [--size-mib 1024] [--rounds 2] [--folder DIR]

PYTHON is an interpreter with shardcast 0.3.2 (and `wget` on the path). One origin, one relay, four clients, each a
process, over loopback; both sides take turns (A B A B). A round begins when the origin is told of the file and ends
when the last client has verified all of it. CPU is what each process (with its children) used in that time; memory is
the largest resident size of each process. A new page of memory costs a virtual machine far more than writing to it, so
give both sides large ones: `mount -t tmpfs -o huge=always tmpfs DIR`. The package's relay looks for news every second
and its clients five times a second, all else is at its defaults; each of its nodes has a copy of the package, since it
keeps scratch files at fixed places. In the same run: what plain sockets carry to four readers, and how fast SHA-256 is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
CLIENTS = 4
GIB = 1 << 30
MEMORY = Path("/dev/shm")
WARM_UP = 2
"""Rounds that are not counted: a virtual machine's memory is slow the first time that it is used."""


class Node:
    """A process, its lines with the instants at which they came, and what it uses."""

    def __init__(self, arguments: list[str], environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, cwd=ROOT,
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        stdout: IO[str] = self.process.stdout  # type: ignore[assignment]
        for line in stdout:
            with self._more:
                self.lines.append((time.monotonic(), line.strip()))
                self._more.notify_all()

    def wait_for(self, wanted: Callable[[str], bool], timeout_s: float = 600.0) -> tuple[float, str]:
        until = time.monotonic() + timeout_s
        with self._more:
            while True:
                for instant, line in self.lines:
                    if wanted(line):
                        return instant, line
                if time.monotonic() > until or self.process.poll() is not None:
                    raise SystemExit(f"{self.process.args} did not say what was expected: {self.lines[-5:]}")
                self._more.wait(0.5)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def cpu_s(self) -> float:
        """User and system time so far, of ended children too."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def ours(folder: Path, file: Path) -> dict[str, float]:
    python = [sys.executable, "-m", "refimpl.shardcast"]
    environment = {"PYTHONPATH": str(ROOT)}
    key = folder / "key"
    nodes: list[Node] = []
    try:
        fast = ["--client-mb-s", "100000"]
        origin = Node(
            [*python, "origin", "--run", "bench", "--key", str(key), "--store", str(folder / "o"), "--link", *fast],
            environment,
        )
        nodes.append(origin)
        url = origin.wait_for(lambda line: " at http" in line)[1].split(" at ")[1].split(",")[0]
        trusted = ["--origin-key", f"{key}.pub"]
        relay = Node([*python, "relay", url, *trusted, "--store", str(folder / "r"), *fast], environment)
        nodes.append(relay)
        relay_url = relay.wait_for(lambda line: " at http" in line)[1].split(" at ")[1]
        for i in range(CLIENTS):
            nodes.append(
                Node([*python, "pull", relay_url, *trusted, "--store", str(folder / f"c{i}"), "--follow"], environment)
            )
        for client in nodes[2:]:
            client.wait_for(lambda line: line.startswith("asking"))
        time.sleep(1.0)
        used = [node.cpu_s() for node in nodes]
        started_s = time.monotonic()
        push = Node([*python, "push", str(file), "--origin", url, "--key", str(key)], environment)
        nodes.append(push)
        # the push itself is a program that starts first: the round begins when the origin hears of the file
        ends = [client.wait_for(lambda line: "whole and verified" in line)[0] for client in nodes[2 : 2 + CLIENTS]]
        begun_s = max(started_s, min(begin_of(folder / "o"), min(ends)))
        figures = measure(nodes[: 2 + CLIENTS], used, begun_s, ends)
        for i in range(CLIENTS):
            assert same(folder / f"c{i}" / "newest" / file.name, file), f"client {i} has other bytes"
        return figures
    finally:
        for node in nodes:
            node.kill()


def begin_of(store: Path) -> float:
    """When the origin began to work on the file, on the monotonic clock: it claims a version number first."""
    age_s = time.time() - (store / ".shardcast.counter").stat().st_mtime
    return time.monotonic() - age_s


def theirs(folder: Path, file: Path, peer: str) -> dict[str, float]:
    found = subprocess.run(
        [peer, "-c", "import shardcast; print(shardcast.__path__[0])"], capture_output=True, text=True, check=True
    )
    nodes: list[Node] = []

    def node(role: str, name: str, *where: str) -> Node:
        private = folder / f"package-{name}"
        shutil.copytree(found.stdout.strip(), private / "shardcast")
        client = private / "shardcast" / "client.py"
        client.write_text(client.read_text().replace("/tmp/dummy.bin", str(private / "dummy.bin")))
        (folder / name).mkdir()
        script = str(Path(__file__).with_name("shardcast_peer.py"))
        made = Node([peer, "-P", script, role, str(folder / name), *where], {"PYTHONPATH": str(private)})
        nodes.append(made)
        return made

    try:
        origin = node("origin", "o")
        url = f"http://127.0.0.1:{origin.wait_for(str.isdigit)[1]}"
        (folder / "o" / "data1.bin").write_bytes(b"x" * 1000)
        relay = node("relay", "r", url)
        relay_url = f"http://127.0.0.1:{relay.wait_for(str.isdigit)[1]}"
        (folder / "r" / "data1.bin").write_bytes(b"x" * 1000)
        clients = [node("client", f"c{i}", relay_url) for i in range(CLIENTS)]
        for client in clients:
            client.wait_for(lambda line: line == "ready")
        time.sleep(1.0)
        used = [each.cpu_s() for each in nodes]
        started_s = time.monotonic()
        origin.tell(str(file))
        ends = [client.wait_for(lambda line: line.startswith("verified"))[0] for client in clients]
        figures = measure(nodes, used, started_s, ends)
        for i in range(CLIENTS):
            assert same(folder / f"c{i}" / "v1.bin", file), f"client {i} has other bytes"
        return figures
    finally:
        for each in nodes:
            each.kill()


def measure(nodes: list[Node], used: list[float], started_s: float, ends: list[float]) -> dict[str, float]:
    cpu = [node.cpu_s() - before for node, before in zip(nodes, used, strict=True)]
    memory = [node.peak_mib() for node in nodes]
    return {
        "end_to_end_s": max(ends) - started_s,
        "first_s": min(ends) - started_s,
        "origin_cpu_s": cpu[0],
        "relay_cpu_s": cpu[1],
        "client_cpu_s": statistics.mean(cpu[2:]),
        "all_cpu_s": sum(cpu),
        "origin_mib": memory[0],
        "relay_mib": memory[1],
        "client_mib": max(memory[2:]),
    }


def same(one: Path, other: Path) -> bool:
    digests = []
    for path in (one, other):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return digests[0] == digests[1]


READER = """
import hashlib, os, socket, sys
connection, piece = socket.create_connection(("127.0.0.1", int(sys.argv[1]))), memoryview(bytearray(1 << 20))
kept, digest = [open(path, "wb", buffering=0) for path in sys.argv[2:]], hashlib.sha256()
while count := connection.recv_into(piece, 0, socket.MSG_WAITALL):
    for file in kept:
        file.write(piece[:count])
        digest.update(piece[:count])
"""


def loopback_s(file: Path, *, keep: bool) -> float:
    """Seconds in which plain sockets carry the file to four readers that throw it away, or (`keep`) write and hash it:
    what is left of a broadcast when there is no protocol, no relay, no second connection."""
    size = file.stat().st_size
    server = socket.create_server(("127.0.0.1", 0))
    port = str(server.getsockname()[1])
    places = [[str(file.with_suffix(f".{i}"))] if keep else [] for i in range(CLIENTS)]
    readers = [subprocess.Popen([sys.executable, "-c", READER, port, *place]) for place in places]
    connections = [server.accept()[0] for _ in readers]

    def send(connection: socket.socket) -> None:
        with connection, file.open("rb") as opened:
            at = 0
            while at < size:
                at += os.sendfile(connection.fileno(), opened.fileno(), at, 1 << 20)

    started_s = time.monotonic()
    threads = [threading.Thread(target=send, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in readers:
        process.wait()
    taken_s = time.monotonic() - started_s
    for place in places:
        for path in place:
            Path(path).unlink()
    return taken_s


def file_system(folder: Path) -> str:
    """Type and options of the file system that a folder lies on, as the system has mounted it."""
    found = ("/", "unknown", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if folder.resolve().is_relative_to(place) and len(place) >= len(found[0]):
            found = (place, kind, options)
    huge = [option for option in found[2].split(",") if option.startswith("huge=")]
    return " ".join([found[1], *huge])


def hash_cpu_s(file: Path) -> float:
    """CPU seconds of SHA-256 over the file."""
    started_s = time.process_time()
    hasher = hashlib.sha256()
    block = os.urandom(1 << 20)
    for _ in range(file.stat().st_size >> 20):
        hasher.update(block)
    return time.process_time() - started_s


def report(
    rounds: dict[str, list[dict[str, float]]],
    size: int,
    loopback: list[float],
    kept: list[float],
    hashing: list[float],
    where: str,
) -> str:
    keys = list(rounds["ours"][0])
    middle = {who: {key: statistics.median(r[key] for r in rows) for key in keys} for who, rows in rounds.items()}
    mine, other = middle["ours"], middle["package"]
    lines = [
        "# SHARDCAST against the published package",
        "",
        f"{size / GIB:g} GiB, one origin, one relay, {CLIENTS} clients over loopback, all files {where}; "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians of "
        f"{len(rounds['ours'])} rounds each in turns, after {WARM_UP} of each that are not counted. Every "
        "client's bytes were compared with the file after each.",
        "",
        "| | ours | shardcast 0.3.2 | ours / package |",
        "| --- | ---: | ---: | ---: |",
    ]  # fmt: skip
    for key in keys:
        lines.append(f"| {key} | {mine[key]:.2f} | {other[key]:.2f} | {mine[key] / other[key]:.3f} |")
    hashed, floor_s = 6 * statistics.median(hashing), statistics.median(kept)  # origin, relay, four clients
    lines += [
        "",
        "Each round (end to end, s): ours "
        + ", ".join(f"{r['end_to_end_s']:.2f}" for r in rounds["ours"])
        + "; package "
        + ", ".join(f"{r['end_to_end_s']:.2f}" for r in rounds["package"]),
        "",
        f"To the four clients: ours {CLIENTS * size / 1e6 / mine['end_to_end_s']:.0f} MB/s, package "
        f"{CLIENTS * size / 1e6 / other['end_to_end_s']:.0f} MB/s; plain sockets that throw the bytes away "
        f"{CLIENTS * size / 1e6 / statistics.median(loopback):.0f} MB/s, plain sockets whose four readers write and "
        f"hash them {CLIENTS * size / 1e6 / floor_s:.0f} MB/s ({floor_s:.2f} s, without a relay, hashing at the origin "
        f"or any protocol: {floor_s / other['end_to_end_s']:.3f} of the package's time).",
        "",
        f"SHA-256 of the file costs {statistics.median(hashing):.2f} s of CPU; six of them (origin, relay, four "
        f"clients) are {100 * hashed / mine['all_cpu_s']:.0f} % of our {mine['all_cpu_s']:.1f} s of CPU in all. Our "
        "origin links the file instead of copying it (`--link`).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, metavar="PYTHON")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=MEMORY if MEMORY.is_dir() else None, help="of the stores")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"ours": [], "package": []}
    loopback, kept, hashing = [], [], []
    with tempfile.TemporaryDirectory(prefix="bench-shardcast-", dir=options.folder) as made:
        folder = Path(made)
        where = f"on {file_system(folder)}"
        file = folder / "model.bin"
        with file.open("wb") as opened:
            for _ in range(options.size_mib):
                opened.write(os.urandom(1 << 20))
        for number in range(WARM_UP + options.rounds):
            for who in ("ours", "package"):
                place = folder / f"{who}-{number}"
                place.mkdir()
                figures: dict[str, Any] = ours(place, file) if who == "ours" else theirs(place, file, options.peer)
                shutil.rmtree(place, ignore_errors=True)
                if number >= WARM_UP:
                    rounds[who].append(figures)
                print(who, json.dumps({key: round(value, 3) for key, value in figures.items()}), flush=True)
            loopback.append(loopback_s(file, keep=False))
            kept.append(loopback_s(file, keep=True))
            hashing.append(hash_cpu_s(file))
        text = report(rounds, file.stat().st_size, loopback, kept, hashing, where)
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text)
        raw = {
            "rounds": rounds,
            "loopback_s": loopback,
            "kept_s": kept,
            "hash_cpu_s": hashing,
            "size_mib": options.size_mib,
        }
        options.out.with_suffix(".json").write_text(json.dumps(raw, indent=2) + "\n")


if __name__ == "__main__":
    main()
