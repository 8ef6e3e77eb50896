"""The process that looks at answers: loads the verifiers it is told to, locks itself down, then scores one at a time.

Messages both ways are a length (4 bytes, little endian) and that much JSON.
    first   {"tasks": [names], "memory_bytes": n}       reply {"ready": true, "locked": bool} or {"error": sentence}
    then    {"number", "task", "reference", "answer", "time_s"}  reply {"number": of the request, "value", "reason"}
They travel on descriptors that a verifier does not know: what it prints, or reads from stdin, is nobody's concern.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from refimpl.tasks import jail
from refimpl.tasks.problem import Problem, Task
from refimpl.tasks.table import find_task


def main() -> None:
    requests, replies = _take_pipes()
    first = _receive(requests)
    assert first is not None
    try:
        tasks = {name: find_task(name) for name in first["tasks"]}
        for task in tasks.values():
            _warm(task)
        jail.limit(memory_bytes=first["memory_bytes"], cpu_s=None)
        locked = jail.available()
        if locked:
            jail.lock(jail.Access.READ)
    except Exception as error:
        _send(replies, {"error": f"{type(error).__name__}: {error}"[:500]})
        return
    _send(replies, {"ready": True, "locked": locked})
    while (request := _receive(requests)) is not None:
        jail.end_after(request["time_s"] + 1.0)
        reply = score(tasks[request["task"]], request["reference"], request["answer"])
        jail.end_after(0.0)
        _send(replies, {"number": request["number"], **reply})


def score(task: Task, reference: str, answer: str) -> dict[str, Any]:
    """The verifier's word, or 0 with the reason why it had none. Whatever a verifier raises, this returns."""
    try:
        value, reason = task.verify(json.loads(reference), answer)
        value = float(value)
    except MemoryError:
        return {"value": 0.0, "reason": "the verifier ran out of memory"}
    except BaseException as error:  # a verifier that calls exit() is one too
        return {"value": 0.0, "reason": f"the verifier raised {type(error).__name__[:40]}"}
    if not 0.0 <= value <= 1.0:  # NaN is not either
        return {"value": 0.0, "reason": "the verifier gave no number from 0 to 1"}
    return {"value": value, "reason": str(reason)[:200]}


def own_rewards(answers: Sequence[tuple[Problem, str]]) -> list[float]:
    """Task rewards, in this process and unbounded: for answers of one's own making, never for a stranger's. Raises
    ValueError for a task that runs programs: those are only run in a jail, by a pool."""
    tasks = [find_task(problem.task) for problem, _ in answers]
    for task in tasks:
        if task.runs_code:
            raise ValueError(f"task {task.name!r} runs programs, expected one whose verifier reads the answer itself")
    return [
        float(score(task, problem.reference, answer)["value"] >= task.solved_at)
        for task, (problem, answer) in zip(tasks, answers, strict=True)
    ]


def _warm(task: Task) -> None:
    """Run the verifier once on a harmless answer, so that what it imports is there before the lock."""
    problem = task.problem(0)
    score(task, problem.reference, "0")


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, replies), moved from stdin and stdout to other descriptors; the two themselves lead nowhere then."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdin, sys.stdout = open(os.devnull), open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    return requests, replies


def _receive(requests: BinaryIO) -> Any:
    header = requests.read(4)
    return json.loads(requests.read(int.from_bytes(header, "little"))) if len(header) == 4 else None


def _send(replies: BinaryIO, message: dict[str, Any]) -> None:
    data = json.dumps(message, allow_nan=False).encode()
    replies.write(len(data).to_bytes(4, "little") + data)
    replies.flush()
