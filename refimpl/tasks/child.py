"""A child process at the end of two pipes, which is never waited for longer than a deadline nor believed too much.

Blocking code: whoever has an event loop runs it elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

ROOT = str(Path(__file__).parents[2])  # the folder that holds `refimpl`


class ChildFailed(Exception):
    """The child did not answer. Takes exactly one argument: the reason, fit to stand in a score."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Child:
    """`main()` of module `module` in a fresh interpreter, in a session of its own, with an empty environment."""

    def __init__(self, module: str, *, bare: bool) -> None:
        flags = ["-I", "-S", "-B"] if bare else ["-I", "-B"]
        path = [ROOT] if bare else [ROOT, *(entry for entry in sys.path if entry)]  # the user's own tasks lie there
        start = f"import sys; sys.path[:0] = {path!r}; from {module} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": os.defpath, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def write(self, data: bytes, deadline: float) -> None:
        """All of `data`, or ChildFailed."""
        view = memoryview(data)
        while view:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ChildFailed(self._ended()) from None

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def read(self, count: int, deadline: float) -> bytes:
        """Exactly `count` bytes, or ChildFailed."""
        data = bytearray()
        while len(data) < count:
            data += self._some(count - len(data), deadline) or self._raise_ended()
        return bytes(data)

    def read_all(self, count_max: int, deadline: float) -> bytes:
        """All until the child closes its end, or ChildFailed where that is more than `count_max` bytes."""
        data = bytearray()
        while part := self._some(65_536, deadline):
            data += part
            if len(data) > count_max:
                raise ChildFailed(f"more than {count_max} bytes of output")
        return bytes(data)

    def exit_status(self, deadline: float) -> int:
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ChildFailed("time-out") from None

    def kill(self) -> None:
        """End it now; safe to call twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _some(self, count: int, deadline: float) -> bytes:
        self._wait(self._out, select.POLLIN, deadline)
        return os.read(self._out, min(count, 65_536))

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        poll = select.poll()  # select() cannot watch descriptors above 1023, which a busy node has
        poll.register(pipe, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ChildFailed("time-out")

    def _ended(self) -> str:
        status = self._process.wait()
        return f"the process was ended by signal {-status}" if status < 0 else f"the process ended with status {status}"

    def _raise_ended(self) -> bytes:
        raise ChildFailed(self._ended())
