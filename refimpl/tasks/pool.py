"""Scores answers in processes that may not do anything else, several at once, each within a time and a memory.

An answer that is too long, a verifier that raises, loops, crashes or eats its memory: each is a 0 with a reason, and
costs its sender nothing but that. A process that does not answer in time is ended and another takes its place.

    with ScorerPool(["addition", "code"]) as pool:
        scores = pool.score([(problem, answer), …])

Blocking: roles call it through `World.compute`, never from the event loop.
"""

from __future__ import annotations

import itertools
import json
import queue
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from refimpl.tasks import code, jail
from refimpl.tasks.child import Child, ChildFailed
from refimpl.tasks.problem import Problem, Score
from refimpl.tasks.strict_json import BadJson, parse_strict
from refimpl.tasks.table import find_task

OUTPUT_BYTES_MAX = 1 << 20  # of a jailed program
REPLY_BYTES_MAX = 4096  # of a scorer
AHEAD, AHEAD_BYTES = 12, 32 << 10  # questions in a scorer's pipe: both pipes hold 64 KiB, so that no one waits to write
SLICE = AHEAD  # answers that an idle scorer takes at once


class _Unread(ChildFailed):
    """The child failed before it can have read the question: that says nothing about the answer."""


@dataclass(frozen=True, kw_only=True)
class ScorerLimits:
    time_s: float = 5.0  # per answer
    memory_bytes: int = 2 << 30  # of a scorer process, address space
    program_memory_bytes: int = 512 << 20  # of a jailed program
    answer_bytes: int = 1 << 18  # longer answers are not looked at
    load_s: float = 120.0  # for a scorer process to be ready; reasoning_gym takes 7 s on a quiet machine

    def __post_init__(self) -> None:
        for name in vars(self):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected more than 0")


class ScorerPool:
    """`processes` scorers for these tasks. Raises ValueError for an unknown task, JailUnavailable where a task runs
    programs and this system cannot lock them down."""

    def __init__(self, tasks: Sequence[str], *, processes: int = 2, limits: ScorerLimits | None = None) -> None:
        if processes < 1:
            raise ValueError(f"processes is {processes}, expected 1 or more")
        self.limits = limits or ScorerLimits()
        self._tasks = {name: find_task(name) for name in tasks}
        if any(task.runs_code for task in self._tasks.values()) and not jail.available():
            raise jail.JailUnavailable("programs can only be run where they can be locked down: Linux, x86-64 or arm64")
        self._verifiers = sorted(name for name, task in self._tasks.items() if not task.runs_code)
        self._idle: queue.SimpleQueue[Child | None] = queue.SimpleQueue()  # None: to be started when needed
        for _ in range(processes):
            self._idle.put(None)
        self._processes = processes
        self._numbers = itertools.count()  # of all questions that were ever asked
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="scorer")

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(wait=True)
        while not self._idle.empty():
            child = self._idle.get()
            if child is not None:
                child.kill()

    def score(self, answers: Sequence[tuple[Problem, str]]) -> list[Score]:
        """A score for each (problem, answer), in order. Never raises for what an answer does."""
        for problem, _ in answers:
            if problem.task not in self._tasks:
                raise ValueError(f"task {problem.task!r} is not one this pool was made for: {sorted(self._tasks)}")
        found: dict[int, tuple[float, str]] = {}
        programs: list[int] = []
        texts: list[int] = []
        for index, (problem, answer) in enumerate(answers):
            size = len(answer.encode("utf-8", "surrogatepass"))
            if size > self.limits.answer_bytes:
                found[index] = 0.0, f"{size} bytes, at most {self.limits.answer_bytes} are read"
            else:
                (programs if self._tasks[problem.task].runs_code else texts).append(index)
        size = max(1, min(SLICE, -(-len(texts) // self._processes)))
        shares = [texts[start : start + size] for start in range(0, len(texts), size)]  # whoever is idle takes the next
        run = self._threads.map(lambda index: self._run_program(*answers[index]), programs)
        asked = self._threads.map(lambda share: self._ask([answers[index] for index in share]), shares)
        found |= dict(zip(programs, run, strict=True))
        for share, replies in zip(shares, asked, strict=True):
            found |= dict(zip(share, replies, strict=True))
        return [self._score(problem, *found[index]) for index, (problem, _) in enumerate(answers)]

    def _score(self, problem: Problem, value: float, reason: str) -> Score:
        solved = value >= self._tasks[problem.task].solved_at
        return Score(value=value, solved=solved, reason="" if solved else reason)

    def _ask(self, answers: Sequence[tuple[Problem, str]]) -> list[tuple[float, str]]:
        """(value, reason) of each, from an idle scorer. One that fails at an answer is not used again: another gets the
        rest, and once more an answer that the failed one never read."""
        found: list[tuple[float, str]] = []
        asked_again = -1
        while len(found) < len(answers):
            child = self._idle.get()
            try:
                if child is None or not child.alive:
                    child = self._start()
                self._question(child, answers[len(found) :], found)
            except ChildFailed as failure:
                if child is not None:
                    child.kill()
                    child = None
                if isinstance(failure, _Unread) and asked_again != len(found):
                    asked_again = len(found)
                    continue
                timed_out = failure.args[0] == "time-out"
                found.append((0.0, f"time-out after {self.limits.time_s} s" if timed_out else failure.args[0]))
            finally:
                self._idle.put(child)
        return found

    def _question(self, child: Child, answers: Sequence[tuple[Problem, str]], found: list[tuple[float, str]]) -> None:
        """Add a score for each answer to `found`. The next few questions lie in the pipe while one is worked at: a turn
        of the processor for each would cost more than the scoring. Each has its own time, from the reply before it."""
        unsent = iter(answers)
        number, request = self._request(next(unsent, None))
        asked: deque[tuple[int, int]] = deque()  # (number, bytes) of the questions that have no reply yet
        broken = ""  # why nothing can be written any more; what was answered before still lies in the other pipe
        for _ in answers:
            deadline = time.monotonic() + self.limits.time_s
            while request and not broken:
                if asked and (len(asked) == AHEAD or sum(size for _, size in asked) + len(request) > AHEAD_BYTES):
                    break
                try:
                    child.write(request, deadline)
                except ChildFailed as failure:
                    broken = failure.args[0]
                else:
                    asked.append((number, len(request)))
                    number, request = self._request(next(unsent, None))
            if not asked:
                raise _Unread(broken)
            reply = _reply(child, deadline)
            if reply.get("number") != asked.popleft()[0]:
                raise ChildFailed("the scorer replied to another question")
            value, reason = reply.get("value"), reply.get("reason")
            if not isinstance(value, float) or not 0.0 <= value <= 1.0 or not isinstance(reason, str):
                raise ChildFailed("the scorer gave no score")
            found.append((value, reason))

    def _request(self, question: tuple[Problem, str] | None) -> tuple[int, bytes]:
        """The next number and the question under it, ready to be sent; nothing where there is none."""
        if question is None:
            return -1, b""
        number, (problem, answer) = next(self._numbers), question
        fields = {"task": problem.task, "reference": problem.reference, "answer": answer, "time_s": self.limits.time_s}
        return number, _framed({"number": number, **fields})

    def _start(self) -> Child:
        child = Child("refimpl.tasks.scorer", bare=False)
        first = {"tasks": self._verifiers, "memory_bytes": self.limits.memory_bytes}
        try:
            deadline = time.monotonic() + self.limits.load_s
            child.write(_framed(first), deadline)
            reply = _reply(child, deadline)
        except ChildFailed as failure:
            child.kill()
            raise RuntimeError(f"a scorer for {self._verifiers} does not start: {failure.args[0]}") from None
        if "error" in reply:
            child.kill()
            raise RuntimeError(f"a scorer for {self._verifiers} does not start: {reply['error']}")
        return child

    def _run_program(self, problem: Problem, answer: str) -> tuple[float, str]:
        """The program's outputs from a process of its own, then the verifier on them (they are strict JSON by then)."""
        program = code.program(answer)
        if program is None:
            return 0.0, "no program"
        reference = json.loads(problem.reference)
        try:
            outputs = run_program(program, reference["entry"], [case[0] for case in reference["cases"]], self.limits)
        except ChildFailed as failure:
            return 0.0, failure.args[0]
        return self._tasks[problem.task].verify(reference, outputs)


def run_program(program: str, entry: str, inputs: list[list[Any]], limits: ScorerLimits) -> list[Any]:
    """What `entry` of a hostile program returns for each input: {"value": …} or {"error": …}. Raises ChildFailed."""
    request = {
        "program": program,
        "entry": entry,
        "inputs": inputs,
        "time_s": limits.time_s,
        "memory_bytes": limits.program_memory_bytes,
    }
    child = Child("refimpl.tasks.code_runner", bare=True)
    deadline = time.monotonic() + limits.time_s
    try:
        child.write(json.dumps(request).encode(), deadline)
        child.close_input()
        output = child.read_all(OUTPUT_BYTES_MAX, deadline)
        status = child.exit_status(deadline)
    except ChildFailed as failure:
        if failure.args[0] == "time-out":
            raise ChildFailed(f"time-out after {limits.time_s} s") from None
        raise
    finally:
        child.kill()
    if status < 0:
        raise ChildFailed(f"the program was ended by signal {-status}")
    try:
        lines = output.decode("utf-8").splitlines()
        return [parse_strict(line, characters_max=OUTPUT_BYTES_MAX) for line in lines[: len(inputs) + 1]]
    except (UnicodeDecodeError, BadJson) as error:
        raise ChildFailed(f"the program's output is not readable: {error}"[:200]) from None


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "little") + data


def _reply(child: Child, deadline: float) -> dict[str, Any]:
    size = int.from_bytes(child.read(4, deadline), "little")
    if size > REPLY_BYTES_MAX:
        raise ChildFailed(f"the scorer sent {size} bytes")
    try:
        reply = parse_strict(child.read(size, deadline).decode("utf-8"))
    except (UnicodeDecodeError, BadJson) as error:
        raise ChildFailed(f"the scorer's reply is not readable: {error}"[:200]) from None
    if not isinstance(reply, dict):
        raise ChildFailed("the scorer's reply is no object")
    return reply
