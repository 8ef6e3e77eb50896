"""Why: a small real network on one machine, with lines of known speed, to hold the model against the kernel's TCP.

Every node is a Linux network namespace, joined to a routing hub by a veth pair whose two directions are shaped by
`tc tbf`: the node's end is its uplink, the hub's end its downlink. A node with latency is joined by a pair of TUN
devices instead, between which a process forwards packets late (`delay.py`); netem is not needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ETHERNET_BYTES, IP_BYTES, PAYLOAD_BYTES = 1514, 1500, 1448
VETH_EFFICIENCY = PAYLOAD_BYTES / ETHERNET_BYTES
"""What tbf counts on a veth is the Ethernet frame: payload of a full segment with time stamps, over the frame."""
TUN_EFFICIENCY = PAYLOAD_BYTES / IP_BYTES
"""A TUN device carries bare IP packets."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A node's line, as shaped."""

    uplink_mbit_s: float
    downlink_mbit_s: float
    latency_ms: float = 0.0  # one way

    @property
    def efficiency(self) -> float:
        return TUN_EFFICIENCY if self.latency_ms else VETH_EFFICIENCY


@dataclass(frozen=True)
class Transfer:
    start_s: float
    source: int
    target: int
    size_bytes: int


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def why_not() -> str | None:
    """A sentence why this machine cannot hold the lab, or None."""
    name = f"armillary-try-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
    except FileNotFoundError:
        return "iproute2 (ip, tc) is not installed"
    except OSError as error:
        return f"network namespaces are not allowed here: {error}"
    try:
        run("ip", "-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
        run(
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            "a",
            "root",
            "tbf",
            "rate",
            "1mbit",
            "burst",
            "32kb",
            "limit",
            "1mb",
        )
    except (OSError, FileNotFoundError) as error:
        return f"veth pairs shaped by tc tbf are not to be had here: {error}"
    finally:
        run("ip", "netns", "del", name)
    return None


class Lab:
    """Namespaces for a set of nodes; use as a context manager, which removes them again."""

    def __init__(self, name: str, lines: Sequence[Line], queue_bytes: int, receive_buffer_bytes: int = 0) -> None:
        """`queue_bytes`: of every line's queue. `receive_buffer_bytes`: of every receiver; 0: the kernel's own."""
        self.lines, self.queue_bytes, self.receive_buffer_bytes = lines, queue_bytes, receive_buffer_bytes
        self.hub = f"armillary-{os.getpid()}-{name}"
        self.spaces = [f"{self.hub}-{i}" for i in range(len(lines))]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        with contextlib.ExitStack() as stack:
            for space in (self.hub, *self.spaces):
                run("ip", "netns", "add", space)
                stack.callback(run, "ip", "netns", "del", space)
                run("ip", "-n", space, "link", "set", "lo", "up")
            self._sysctl(self.hub, "net.ipv4.ip_forward=1")
            for i, line in enumerate(self.lines):
                stack.enter_context(self._join(i, line))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, node: int) -> str:
        return f"10.77.{node}.2"

    @staticmethod
    def _sysctl(space: str, setting: str) -> None:
        run("ip", "netns", "exec", space, "sysctl", "-q", "-w", setting)

    @contextlib.contextmanager
    def _join(self, i: int, line: Line) -> Iterator[None]:
        space, port = self.spaces[i], f"p{i}"
        with contextlib.ExitStack() as stack:
            if line.latency_ms:
                command = [sys.executable, str(HERE / "delay.py"), space, "wan", self.hub, port, str(line.latency_ms)]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert process.stdin is not None and process.stdout is not None
                stack.callback(process.communicate)  # closes its standard input: its sign to end
                if process.stdout.readline() != b"ready\n":
                    raise OSError("delay.py could not open its TUN devices")
            else:
                run(
                    "ip",
                    "-n",
                    space,
                    "link",
                    "add",
                    "name",
                    "wan",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    port,
                    "netns",
                    self.hub,
                )
            for where, device, address, mbit_s in (
                (space, "wan", f"10.77.{i}.2/24", line.uplink_mbit_s),
                (self.hub, port, f"10.77.{i}.1/24", line.downlink_mbit_s),
            ):
                run("ip", "-n", where, "addr", "add", address, "dev", device)
                run("ip", "-n", where, "link", "set", device, "up")
                self._shape(where, device, mbit_s)
            run("ip", "-n", space, "route", "add", "default", "via", f"10.77.{i}.1")
            yield

    def _shape(self, space: str, device: str, mbit_s: float) -> None:
        run(
            *("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf"),
            *("rate", f"{round(mbit_s * 1e6)}bit", "burst", "16kb", "limit", str(self.queue_bytes)),
        )

    def measure(self, transfers: Sequence[Transfer], control: str = "cubic") -> tuple[list[float], list[int]]:
        """Send them all. Returns when each had arrived, in seconds since the beginning, and the window that each was
        offered at last. `control`: TCP's congestion control."""
        begin_s = time.monotonic() + 1.5 + 0.02 * len(transfers)
        processes = []
        for node, space in enumerate(self.spaces):
            plan = {
                "address": self.address(node),
                "begin_s": begin_s,
                "receive_buffer_bytes": self.receive_buffer_bytes,
                "congestion_control": control,
                "sends": [
                    (t.start_s, self.address(t.target), number, t.size_bytes)
                    for number, t in enumerate(transfers)
                    if t.source == node
                ],
                "expected": sum(t.target == node for t in transfers),
            }
            command = ["ip", "netns", "exec", space, sys.executable, str(HERE / "endpoint.py")]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdin is not None
            process.stdin.write(json.dumps(plan))
            process.stdin.close()
            processes.append(process)
        finish_s: dict[int, float] = {}
        window_bytes: dict[int, int] = {}
        for process in processes:
            assert process.stdout is not None
            output = process.stdout.read()
            if process.wait():
                raise OSError("a node of the lab failed; see its message above")
            seen = json.loads(output)
            finish_s |= {int(number): at_s for number, at_s in seen["finish_s"].items()}
            window_bytes |= {int(number): window for number, window in seen["window_bytes"].items()}
        numbers = range(len(transfers))
        return [finish_s[number] for number in numbers], [window_bytes[number] for number in numbers]
