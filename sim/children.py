"""Why: a node, or the network, that runs for real is a process with pipes, files and a way to die; all of that is here.

A parent speaks to its children in JSON lines over their standard streams (`refimpl/worlds/process.py` and `wire.py`
say which). What a child says on standard error is kept, and quoted when it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from sim.scenario import ScenarioError

START_S = 600.0  # loading a model in many processes at once on a busy machine
STOP_S = 10.0


class SwarmFailed(ScenarioError):
    """A process did not start, or the network failed. Takes exactly one argument: the sentence."""


class Child:
    """One process."""

    def __init__(self, name: str, module: str, config: dict[str, Any], base: Path) -> None:
        """Starts `python -m MODULE CONFIG`; `base` is where its files go, without their endings."""
        self.name = name
        self.url = ""
        self.halted = False
        self.done = False  # it has said that its part is
        self._heard = b""
        path = base.with_name(base.name + ".json")
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
        self._log: IO[str] = base.with_name(base.name + ".log").open("a", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )

    # ---------------------------------------------------------------------------------------------------- speaking
    def say(self, order: dict[str, Any]) -> None:
        """Give an order; a child that is dead by now does not hear it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def hears(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """The next thing it says within `wait_s`; None: it said nothing, or has ended."""
        stdout = self.process.stdout
        assert stdout is not None
        until_s = time.monotonic() + wait_s
        while b"\n" not in self._heard:
            if stdout.closed or not select.select([stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
                return None
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                return None
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        answer = json.loads(line)
        assert isinstance(answer, dict), line
        return answer

    def listens(self, wait_s: float = 0.0) -> bool:
        """Whether it has said where it listens, by `wait_s` from now. Raises SwarmFailed when it has ended instead."""
        if self.url:
            return True
        answer = self.hears(wait_s)
        if answer is not None and "url" in answer:
            self.url = answer["url"]
            return True
        if answer is None and wait_s == 0.0 and self.process.poll() is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        if self.process.poll() is None:
            raise SwarmFailed(f"node {self.name!r} did not listen within {START_S:g} s; {self.last_words()}")
        raise SwarmFailed(f"node {self.name!r} did not start; its last words: {self.last_words()}")

    def last_words(self) -> str:
        """The end of what it said on standard error."""
        text = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip()
        return text[-600:] or "(none)"

    # ------------------------------------------------------------------------------------------------ life and death
    @property
    def code(self) -> int | None:
        """Its exit code; None while it lives."""
        return self.process.poll()

    def halt(self, halted: bool) -> None:
        """SIGSTOP: it stands still with its connections open. SIGCONT: it goes on where it stood."""
        if halted != self.halted and self.code is None:
            self.process.send_signal(signal.SIGSTOP if halted else signal.SIGCONT)
        self.halted = halted

    def kill(self) -> None:
        """SIGKILL: it dies as it stands. It is gone, to the last byte, after `bury`."""
        self.process.kill()

    def bury(self) -> None:
        """Wait until it is dead, and let go of its files."""
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Let go of its files."""
        for stream in (self.process.stdin, self.process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def cpu_s(self) -> float | None:
        """Seconds of processor time that it has used; None where the system does not say (no /proc)."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stop_all(children: Iterable[Child]) -> None:
    """End of input first, then the signals that no process can sleep through. Never raises."""
    children = list(children)
    for child in children:
        child.halt(False)
        if child.process.stdin is not None:
            with contextlib.suppress(OSError):
                child.process.stdin.close()
    for end in (lambda process: None, lambda process: process.terminate(), lambda process: process.kill()):
        for child in children:
            if child.code is None:
                end(child.process)
        deadline_s = time.monotonic() + STOP_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, deadline_s - time.monotonic()))
    for child in children:
        child.close()
