"""Why: netem is not in every kernel, and a distant node needs latency; this process carries packets late.

    delay.py SPACE_A DEVICE_A SPACE_B DEVICE_B LATENCY_MS

Opens a TUN device in each of two network namespaces and forwards every packet from one to the other after LATENCY_MS,
in order, both ways. Prints "ready" once both are there; ends when its standard input is closed. Asks for real-time
scheduling, since a late forwarder is a longer line.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000


def open_tun(space: str, device: str) -> int:
    """A TUN device of that name in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {space}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def main() -> None:
    space_a, device_a, space_b, device_b = sys.argv[1:5]
    latency_s = float(sys.argv[5]) / 1e3
    ends = (open_tun(space_a, device_a), open_tun(space_b, device_b))
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    waiting: deque[tuple[float, int, bytes]] = deque()  # due time, where to, packet: due times only rise
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        ready, _, _ = select.select([*ends, sys.stdin], [], [], pause_s)
        if sys.stdin in ready:
            return
        for tun in (end for end in ends if end in ready):
            for _ in range(64):
                try:
                    packet = os.read(tun, 65_536)
                except BlockingIOError:
                    break
                waiting.append((time.monotonic() + latency_s, other[tun], packet))
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, target, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # a device that is not up yet loses the packet, as a line would
                os.write(target, packet)


main()
