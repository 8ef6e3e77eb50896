"""Runs one hostile program on some inputs and prints what it returned. Started bare, for one program, then gone.

It is given the program and the inputs, never the expected outputs. It loads the modules that a solution may want, then
locks itself down so far that no file can be opened, and only then compiles what it was given.

    python -I -S -B -c "…; from refimpl.tasks.code_runner import main; main()"   < request.json   > reply.jsonl
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from typing import Any

from refimpl.tasks import jail

PRELOADED = (
    "array", "bisect", "cmath", "collections", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "heapq", "itertools", "math", "operator", "random", "re", "statistics", "string",
    "textwrap", "typing", "unicodedata",
)  # fmt: skip


def main() -> None:
    """Request on stdin: {program, entry, inputs, time_s, memory_bytes}; one line of JSON a case on stdout."""
    for name in PRELOADED:
        importlib.import_module(name)
    request = json.loads(sys.stdin.buffer.read())
    out = sys.stdout.buffer
    jail.end_after(request["time_s"] + 1.0)
    jail.limit(memory_bytes=request["memory_bytes"], cpu_s=request["time_s"], open_files=8)
    jail.lock(jail.Access.NOTHING)
    sys.stdout = sys.stderr = io.StringIO()  # what the program prints is nobody's concern
    for reply in replies(request["program"], request["entry"], request["inputs"]):
        out.write(reply)
        out.flush()


def replies(program: str, entry: str, inputs: list[list[Any]]) -> Any:
    """One line for each case. Whatever the program raises, exits with or returns is a line, never an end."""
    namespace: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(compile(program, "<solution>", "exec"), namespace)
        function = namespace[entry]
    except BaseException as error:  # SystemExit, KeyboardInterrupt: the program's own
        failed = _line({"error": type(error).__name__[:40]})
        yield from (failed for _ in inputs)
        return
    for arguments in inputs:
        try:
            line = _line({"value": function(*arguments)})
        except BaseException as error:
            line = _line({"error": type(error).__name__[:40]})
        yield line


def _line(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply, allow_nan=False).encode() + b"\n"
