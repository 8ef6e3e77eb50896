"""SHARDCAST as its users run it: commands in processes of their own. Helpers of the tests that do so."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
START_S = 60.0


class Process:
    """`python -m refimpl.shardcast ...` in the background; killed at the end of the `with`."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log, self.arguments = log, [str(argument) for argument in arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "refimpl.shardcast", *self.arguments],
                stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
            )  # fmt: skip

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first match of `pattern` in what the process has said."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if match := re.search(pattern, self.text):
                return match
            assert self.running, f"it ended without saying {pattern!r}: {self.text}"
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} within {timeout_s:g} s: {self.text}")

    def wait(self, timeout_s: float = START_S) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def terminate(self) -> None:
        """SIGTERM: asked to end."""
        assert self._process is not None
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def visible(store: Path) -> list[str]:
    """What a store shows, apart from its counter."""
    return sorted(path.name for path in store.iterdir() if path.name != ".shardcast.counter")
