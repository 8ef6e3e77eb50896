"""Why: to compare with real TCP, somebody must really send; this is one node of the lab, in its own network namespace.

Reads a plan (JSON) from standard input: the address to listen on, when the run begins (CLOCK_MONOTONIC, which all
namespaces share), what to send (start, address, number, bytes) and how many transfers to expect. All connections are
made before the run begins. Prints, as JSON, when the last byte of each expected transfer arrived, in seconds since the
beginning, and how large a window each sent transfer was offered at last. Standard library only.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any

PORT = 7000
SND_WND = 228  # offset of tcpi_snd_wnd in struct tcp_info
CHUNK = b"\0" * 65_536


def receive(connection: socket.socket, begin_s: float, finish_s: dict[int, float]) -> None:
    head = b""
    while len(head) < 16:
        head += connection.recv(16 - len(head))
    number, left = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
    buffer = bytearray(1 << 18)
    while left:
        got = connection.recv_into(buffer, min(left, len(buffer)))
        if got == 0:
            raise ConnectionError(f"transfer {number} ended {left} bytes early")
        left -= got
    finish_s[number] = time.monotonic() - begin_s
    connection.close()


def send(connection: socket.socket, begin_s: float, transfer: list[Any], window_bytes: dict[int, int]) -> None:
    start_s, _, number, left = transfer
    time.sleep(max(0.0, begin_s + start_s - time.monotonic()))
    while left:
        left -= connection.send(CHUNK[: min(left, len(CHUNK))])
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
    window_bytes[number] = int.from_bytes(info[SND_WND : SND_WND + 4], sys.byteorder)
    connection.shutdown(socket.SHUT_WR)


def connect(address: str, control: str) -> socket.socket:
    deadline_s = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=20)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            return connection
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def main() -> None:
    plan = json.load(sys.stdin)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if plan["receive_buffer_bytes"]:  # accepted connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, plan["receive_buffer_bytes"])
    listener.bind((plan["address"], PORT))
    listener.listen(64)
    finish_s: dict[int, float] = {}
    window_bytes: dict[int, int] = {}
    threads = []
    for transfer in plan["sends"]:
        _, address, number, size = transfer
        connection = connect(address, plan["congestion_control"])
        connection.settimeout(None)
        connection.sendall(number.to_bytes(8, "big") + size.to_bytes(8, "big"))
        threads.append(threading.Thread(target=send, args=(connection, plan["begin_s"], transfer, window_bytes)))
    for _ in range(plan["expected"]):
        connection, _ = listener.accept()
        threads.append(threading.Thread(target=receive, args=(connection, plan["begin_s"], finish_s)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"finish_s": finish_s, "window_bytes": window_bytes}))


main()
