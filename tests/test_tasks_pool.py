"""Every scorer reads hostile input: bounded in time and memory, jailed, and whatever happens is a 0 with a reason."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from refimpl.tasks import jail
from refimpl.tasks.child import Child, ChildFailed
from refimpl.tasks.pool import ScorerLimits, ScorerPool, run_program
from refimpl.tasks.problem import Problem, Score
from refimpl.tasks.table import TASKS

pytestmark = pytest.mark.skipif(
    not jail.available(), reason="programs are locked down on Linux on x86-64 and arm64 only"
)

LIMITS = ScorerLimits(time_s=3.0, program_memory_bytes=256 << 20)
ADD, CODE = TASKS["addition"].problem(3), TASKS["code"].problem(3, level=2)


@pytest.fixture(scope="module")
def scorers() -> Iterator[ScorerPool]:
    with ScorerPool(["addition", "json", "code"], processes=2, limits=LIMITS) as made:
        yield made


def run(program: str, inputs: list | None = None) -> list:
    return run_program(program, "solve", inputs if inputs is not None else [[[1, 2]]], LIMITS)


# --- the ordinary way -------------------------------------------------------------------------------------------------

SOLUTION = """
def solve(xs):
    xs = xs[4:]
    xs = [sum(xs[:i + 1]) for i in range(len(xs))]
    return sum(reversed(xs))
"""


def test_right_and_wrong_answers_in_order(scorers: ScorerPool) -> None:
    fenced = f"<think>hm</think>Here:\n```python\n{SOLUTION}\n```"
    answers = [(ADD, "58"), (CODE, fenced), (ADD, "59"), (CODE, fenced.replace("4:", "3:")), (ADD, " 58 ")]
    scores = scorers.score(answers)
    assert [score.solved for score in scores] == [True, True, False, False, True]
    assert scores[0] == Score(value=1.0, solved=True, reason="") and scores[0].reward == 1.0
    assert scores[3].reason.startswith("case ") and scores[2].reason == "another answer"


def test_every_task_of_ours_is_solved_by_its_solution(scorers: ScorerPool) -> None:
    problem = TASKS["json"].problem(7, level=5)
    assert scorers.score([(problem, json.dumps(json.loads(problem.reference)["value"]))])[0].solved


def test_modules_a_solution_may_want_are_there() -> None:
    program = "import math, collections, heapq, re, itertools, bisect, functools\ndef solve(xs): return math.comb(9, 4)"
    assert run(program) == [{"value": 126}]


def test_what_a_program_prints_is_ignored() -> None:
    assert run("print('[1]' * 9)\ndef solve(xs):\n print('hello')\n return [xs]") == [{"value": [[1, 2]]}]


# --- hostile answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("9" * 1_000_000, "1000000 bytes, at most 262144"),
        ("9" * 200_000, "another answer"),
        ("\ud800" * 10, "another answer"),
        ("\0" * 1000, "another answer"),
    ],
)
def test_long_and_odd_answers(scorers: ScorerPool, answer: str, reason: str) -> None:
    (score,) = scorers.score([(ADD, answer)])
    assert score.reward == 0 and reason in score.reason


@pytest.mark.parametrize(
    "answer", ["[" * 60_000, '{"a":' * 12_000, "1" * 60_000, '{"age": 1e999}', '"' + "\\" * 60_000, "[" * 31 + "]" * 31]
)
def test_deep_and_huge_json(scorers: ScorerPool, answer: str) -> None:
    started = time.monotonic()
    (score,) = scorers.score([(TASKS["json"].problem(0), answer)])
    assert score.reward == 0 and score.reason and time.monotonic() - started < LIMITS.time_s


# Each is run as a solution; `error` is what its case or its process ends with.
HOSTILE = {
    "socket": ("import _socket\n_socket.socket()", "ModuleNotFoundError|PermissionError|ImportError"),
    "read a file": ("open('/etc/passwd').read()", "PermissionError"),
    "read itself": ("open('/proc/self/mem', 'rb')", "PermissionError"),
    "read its parent": ("import os\nopen(f'/proc/{os.getpid() - 1}/mem', 'rb')", "PermissionError"),
    "write a file": ("open('/tmp/armillary-hostile', 'w').write('x')", "PermissionError"),
    "delete a file": ("import os\nos.unlink('/tmp/armillary-victim')", "PermissionError"),
    "list a folder": ("import os\nos.listdir('/')", "PermissionError"),
    "fork": ("import os\nos.fork()", "PermissionError"),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
    "subprocess": ("import os\nos.posix_spawn('/bin/true', ['true'], {})", "PermissionError"),
    "thread": ("import _thread\n_thread.start_new_thread(print, ())", "RuntimeError"),
    "signal its parent": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "other machine calls": (
        "import ctypes\nassert ctypes.CDLL(None).socket(2, 1, 0) == -1\n1 / 0",
        "ZeroDivisionError",
    ),
    "exit": ("raise SystemExit", "SystemExit"),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "memory": ("x = [0] * 10**9", "MemoryError"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "huge number": ("x = 10 ** 10 ** 10", "time-out|signal|MemoryError"),
    "endless loop": ("while True: pass", "time-out|signal"),
    "endless sleep": ("import time\ntime.sleep(1e6)", "time-out|signal"),
    "endless output": ("import os\nwhile True: os.write(1, b'x' * 65536)", "bytes of output"),
    "leave silently": ("import os\nos._exit(0)", "no output at all"),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "signal 11"),
    "deep result": ("x = []\nfor _ in range(500): x = [x]\ndef solve(xs): return x", "nested"),
    "not JSON": ("def solve(xs): return {1, 2}", "TypeError"),
    "not a number": ("def solve(xs): return float('nan')", "ValueError"),
    "no function": ("solve = 3", "TypeError"),
    "no name": ("x = 1", "KeyError"),
    "no program": ("def solve(:", "SyntaxError"),
    "hostile error": ("class E(Exception):\n def __str__(self): raise E\nraise E", "E"),
    "zero bytes": ("\0", "SyntaxError|ValueError"),
}


@pytest.mark.parametrize("what", list(HOSTILE))
def test_hostile_programs(what: str, tmp_path: Path) -> None:
    """No network, no files, no processes, no signals; limits on time, memory and output."""
    program, error = HOSTILE[what]
    victim = Path("/tmp/armillary-victim")
    if what == "delete a file":
        victim.write_text("keep")
    started = time.monotonic()
    try:
        outputs = run(program)
        found = "|".join(output.get("error", "value") for output in outputs) or "no output at all"
    except ChildFailed as failure:
        found = failure.args[0]
    assert any(part in found for part in error.split("|")), found
    assert time.monotonic() - started < LIMITS.time_s + 2
    assert not Path("/tmp/armillary-hostile").exists()
    if what == "delete a file":
        assert victim.read_text() == "keep"
        victim.unlink()


def test_expected_outputs_are_nowhere_near_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that crosses the pipe holds the inputs alone."""
    sent: list[bytes] = []
    real = Child.write

    def spy(self: Child, data: bytes, deadline: float) -> None:
        sent.append(data)
        real(self, data, deadline)

    monkeypatch.setattr(Child, "write", spy)
    reference = {"entry": "solve", "cases": [[[[4, 5]], "secret-expected"]]}
    problem = Problem(task="code", problem_id="x", prompt="", reference=json.dumps(reference))
    with ScorerPool(["code"], processes=1, limits=LIMITS) as scorers:
        (score,) = scorers.score([(problem, "```python\ndef solve(xs): return 'secret-expected'\n```")])
    assert score.solved
    (request,) = sent
    assert b"secret-expected" in request, "as the program's own text"
    assert json.loads(request)["inputs"] == [[[4, 5]]] and request.count(b"secret") == 1


def test_forged_output_lines_do_not_help(scorers: ScorerPool) -> None:
    """A program that writes its own reply lines still has to know the values; one too many is no reply."""
    forged = "import os\nfor _ in range(99): os.write(1, b'{\"value\": 0}\\n')\ndef solve(xs): return 0"
    (score,) = scorers.score([(CODE, f"```python\n{forged}\n```")])
    assert not score.solved and score.reason


# --- verifiers that misbehave -----------------------------------------------------------------------------------------

BAD_TASKS = """
import os, socket, time
from refimpl.tasks import arithmetic
from refimpl.tasks.problem import Task

def bad(reference, answer):
    if answer == "raise": raise RuntimeError("secret")
    if answer == "exit": raise SystemExit
    if answer == "die": os._exit(3)
    if answer == "loop":
        while True: pass
    if answer == "sleep": time.sleep(1e6)
    if answer == "memory": return float(len(bytearray(1 << 34))), ""
    if answer == "nan": return float("nan"), ""
    if answer == "two": return 2.0, ""
    if answer == "none": return None
    if answer == "half": return 0.5, "half right"
    if answer == "socket": socket.socket()
    if answer == "write": open("/tmp/armillary-hostile", "w")
    if answer == "delete": os.unlink("/tmp")
    if answer == "fork": os.fork()
    if answer == "long": return 0.0, "x" * 10_000_000
    if answer == "talk": os.write(1, b"\\xff" * 100)
    return 1.0, ""

BAD = Task(name="bad_tasks:BAD", generate=arithmetic.addition, verify=bad, levels=1, solved_at=1.0, solved_means="")
"""
BAD = Problem(task="bad_tasks:BAD", problem_id="b", prompt="", reference="0")


@pytest.fixture(scope="module")
def bad_scorers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScorerPool]:
    """A user's own task, from a module of his own, whose verifier does whatever the answer says."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad_tasks.py").write_text(BAD_TASKS)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    with ScorerPool([BAD.task], processes=1, limits=ScorerLimits(time_s=1.0)) as made:
        yield made
    patch.undo()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("raise", "the verifier raised RuntimeError"),
        ("exit", "the verifier raised SystemExit"),
        ("die", "the process ended with status 3"),
        ("loop", "time-out after 1.0 s"),
        ("sleep", "time-out after 1.0 s"),
        ("memory", "the verifier ran out of memory"),
        ("nan", "no number from 0 to 1"),
        ("two", "no number from 0 to 1"),
        ("none", "the verifier raised TypeError"),
        ("half", "half right"),
        ("socket", "the verifier raised PermissionError"),
        ("write", "the verifier raised PermissionError"),
        ("delete", "the verifier raised PermissionError"),
        ("fork", "the verifier raised PermissionError"),
        ("talk", "the scorer sent 4294967295 bytes"),
        ("long", "x" * 200),
    ],
)
def test_whatever_a_verifier_does_is_a_score(bad_scorers: ScorerPool, answer: str, reason: str) -> None:
    scores = bad_scorers.score([(BAD, answer), (BAD, "fine")])
    assert scores[1].solved, "the next answer is scored as if nothing had been"
    assert not scores[0].solved and reason in scores[0].reason
    assert scores[0].value == (0.5 if answer == "half" else 0.0)


def test_each_of_many_answers_gets_its_own_score_whoever_dies_between_them(bad_scorers: ScorerPool) -> None:
    """Questions lie ahead in the pipe; who fails is never mistaken for a neighbour, and nobody's time is another's."""
    answers = ["fine", "die", "half", "fine", "long", *["fine"] * 13, "die", "x" * 40_000, "raise", "talk", "fine"]
    scores = bad_scorers.score([(BAD, answer) for answer in answers])
    assert [score.solved for score in scores] == [answer in ("fine", "x" * 40_000) for answer in answers]
    reasons = {answer: score.reason for answer, score in zip(answers, scores, strict=True)}
    assert reasons["half"] == "half right" and "RuntimeError" in reasons["raise"] and "status 3" in reasons["die"]


def test_a_pool_does_not_block_its_caller_beyond_the_limit(bad_scorers: ScorerPool) -> None:
    """Two loops one after another on one process: each is ended at its own second."""
    started = time.monotonic()
    bad_scorers.score([(BAD, "loop"), (BAD, "sleep")])
    assert 2.0 <= time.monotonic() - started < 12.0


# --- the pool itself --------------------------------------------------------------------------------------------------


def test_processes_end_with_the_pool() -> None:
    with ScorerPool(["addition"], processes=2, limits=LIMITS) as made:
        made.score([(ADD, "1")] * 4)
        children = [made._idle.get() for _ in range(2)]
        pids = [child._process.pid for child in children if child is not None]
        assert pids
        for child in children:
            made._idle.put(child)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_several_callers_share_a_pool(scorers: ScorerPool) -> None:
    results: dict[int, list[Score]] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: scorers.score([(ADD, "58" if n % 2 else "1")] * 5)}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all([score.solved for score in results[n]] == [bool(n % 2)] * 5 for n in range(4))


def test_bad_use_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        ScorerPool(["nothing"])
    with pytest.raises(ValueError, match="processes is 0"):
        ScorerPool(["addition"], processes=0)
    with pytest.raises(ValueError, match="time_s is 0"):
        ScorerLimits(time_s=0)
    with ScorerPool(["json"], processes=1) as made, pytest.raises(ValueError, match="'addition' is not one"):
        made.score([(ADD, "1")])


def test_no_program_runs_where_it_cannot_be_locked_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, not open: without the kernel's help a pool for code is not made at all."""
    monkeypatch.setattr(jail.platform, "machine", lambda: "riscv64")
    with pytest.raises(jail.JailUnavailable, match="can only be run"):
        ScorerPool(["code"])
    with pytest.raises(jail.JailUnavailable, match="riscv64"):
        jail.lock(jail.Access.NOTHING)
