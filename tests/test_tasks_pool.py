"""Every scorer reads hostile input: bounded in time and memory, jailed, and whatever happens is a 0 with a reason."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from refimpl.tasks import jail
from refimpl.tasks import pool as pool_module
from refimpl.tasks.child import Child, ChildFailed
from refimpl.tasks.pool import ScorerLimits, ScorerPool, run_program
from refimpl.tasks.problem import Problem, Score
from refimpl.tasks.scorer import own_rewards
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
import json, os, socket, sys, time
from contextlib import suppress
from refimpl.tasks import arithmetic
from refimpl.tasks.problem import Task

REPLY = json.dumps({"number": 1 << 40, "value": 1.0, "reason": ""}).encode()
FRAME = len(REPLY).to_bytes(4, "little") + REPLY

def everywhere(data):
    for descriptor in range(3, 64):
        with suppress(OSError): os.write(descriptor, data)

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
    if answer == "print": print("x" * 100_000)
    if answer == "talk": os.write(1, b"\\xff" * 100)
    if answer == "frame": os.write(1, FRAME)
    if answer == "ask": return float(len(sys.stdin.read()) + len(os.read(0, 9)) == 0), ""
    if answer == "garbage": everywhere(b"\\xff" * 100)
    if answer == "forge": everywhere(FRAME)
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
        ("garbage", "the scorer sent 4294967295 bytes"),
        ("forge", "the scorer replied to another question"),
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
    answers = ["fine", "die", "half", "fine", "long", *["fine"] * 13, "die", "x" * 40_000, "raise", "garbage", "fine"]
    scores = bad_scorers.score([(BAD, answer) for answer in answers])
    assert [score.solved for score in scores] == [answer in ("fine", "x" * 40_000) for answer in answers]
    reasons = {answer: score.reason for answer, score in zip(answers, scores, strict=True)}
    assert reasons["half"] == "half right" and "RuntimeError" in reasons["raise"] and "status 3" in reasons["die"]


@pytest.mark.parametrize("answer", ["print", "talk", "frame", "ask"])
def test_what_a_verifier_prints_or_reads_changes_nobodys_verdict(bad_scorers: ScorerPool, answer: str) -> None:
    """Replies and requests travel on descriptors of their own: stdout and stdin are nobody's concern."""
    answers = ["fine", "half", answer, "half", "fine", answer, "raise", *["fine"] * 9, "half"]
    scores = bad_scorers.score([(BAD, one) for one in answers])
    expected = {"half": (0.5, "half right"), "raise": (0.0, "the verifier raised RuntimeError")}
    assert [(score.value, score.reason) for score in scores] == [expected.get(one, (1.0, "")) for one in answers]


def test_a_forged_reply_is_never_taken_for_a_neighbours(bad_scorers: ScorerPool) -> None:
    """Even on the right descriptor: the number is that of no question, and the one who forged pays alone."""
    answers = ["fine", "half", "forge", "half", "raise", "forge", "fine"]
    scores = bad_scorers.score([(BAD, one) for one in answers])
    assert [score.value for score in scores] == [1.0, 0.5, 0.0, 0.5, 0.0, 0.0, 1.0]


def test_a_pool_does_not_block_its_caller_beyond_the_limit(bad_scorers: ScorerPool) -> None:
    """Two loops one after another on one process: each is ended at its own second."""
    started = time.monotonic()
    bad_scorers.score([(BAD, "loop"), (BAD, "sleep")])
    assert 2.0 <= time.monotonic() - started < 12.0


# --- who is to blame, with scorers that break where we want -----------------------------------------------------------


class FakeChild:
    """A scorer that gives each answer, a number, as its value. `plans[i]` is what the i-th one does, after its start:
    `takes` writes work, any later one breaks; `replies` replies come, then its end."""

    plans: ClassVar[list[tuple[int, int]]] = []
    made: ClassVar[list[FakeChild]] = []

    def __init__(self, *_: object, **__: object) -> None:
        self.takes, self.replies = self.plans.pop(0) if self.plans else (10**9, 10**9)
        self.alive, self.written, self.read_count, self.buffer = True, 0, 0, bytearray()
        self.made.append(self)

    def write(self, data: bytes, deadline: float) -> None:
        request = json.loads(data[4:])
        if "tasks" in request:
            self.buffer += framed({"ready": True})
        elif self.written >= self.takes:
            raise ChildFailed("the process ended with status 3")
        else:
            self.written += 1
            if self.written <= self.replies:
                self.buffer += framed({"number": request["number"], "value": float(request["answer"]), "reason": "r"})

    def read(self, count: int, deadline: float) -> bytes:
        if not self.buffer:
            raise ChildFailed("the process ended with status 3")
        data, self.buffer = bytes(self.buffer[:count]), self.buffer[count:]
        self.read_count += count != 4
        return data

    def kill(self) -> None:
        self.alive = False


def framed(message: dict) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "little") + data


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeChild]:
    monkeypatch.setattr(FakeChild, "plans", [])
    monkeypatch.setattr(FakeChild, "made", [])
    monkeypatch.setattr(pool_module, "Child", FakeChild)
    return FakeChild


def values(answers: list[str], processes: int = 1) -> list[tuple[float, str]]:
    with ScorerPool(["addition"], processes=processes, limits=LIMITS) as made:
        return [(score.value, score.reason) for score in made.score([(ADD, answer) for answer in answers])]


ENDED = (0.0, "the process ended with status 3")


def test_a_reply_that_lies_in_the_pipe_counts_when_a_write_ahead_fails(fake: type[FakeChild]) -> None:
    """The child answered two questions, died at the third, and the fourth could not be written any more: the third is
    a 0, and no other is."""
    fake.plans = [(3, 2)]
    assert values(["0.1", "0.2", "0.3", "0.4", "0.5"]) == [(0.1, "r"), (0.2, "r"), ENDED, (0.4, "r"), (0.5, "r")]
    assert [child.written for child in fake.made] == [3, 2]


@pytest.mark.parametrize("takes", [0, 1, 2])
def test_an_answer_that_was_never_read_is_asked_again(fake: type[FakeChild], takes: int) -> None:
    """The child ends after its last reply, with nothing of the next question in its pipe: nobody is to blame."""
    fake.plans = [(takes, takes)]
    assert values(["0.1", "0.2", "0.3"]) == [(0.1, "r"), (0.2, "r"), (0.3, "r")]
    assert [child.written for child in fake.made] == [takes, 3 - takes]


def test_an_answer_is_asked_again_once_and_no_more(fake: type[FakeChild]) -> None:
    fake.plans = [(0, 0), (0, 0), (0, 0), (1, 1)]
    assert values(["0.1", "0.2", "0.3"]) == [ENDED, (0.2, "r"), (0.3, "r")], "twice the first, then twice the second"
    assert [child.written for child in fake.made] == [0, 0, 0, 1, 1]


def test_questions_are_put_into_words_when_they_are_sent(
    fake: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long ones, each more than may lie in the pipe beside another: at most the next one is ready."""
    ready: list[int] = []
    real = pool_module._framed

    def counted(message: dict) -> bytes:
        ready.append(len(ready) - sum(child.read_count for child in fake.made))
        return real(message)

    monkeypatch.setattr(pool_module, "_framed", counted)
    long = "0" * 40_000 + ".5"
    assert values([long] * 20) == [(0.5, "r")] * 20
    assert len(ready) == 21 and max(ready) <= 1, "the first message is the scorer's start"


def test_nobody_waits_for_the_answers_that_another_scorer_is_slow_at(
    fake: type[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scorer stands still until all answers but its own are scored: the other one scores them, in order."""
    others_done = threading.Event()
    waited: list[bool] = []
    lock = threading.Lock()
    scored = 0
    real = FakeChild.read

    def read(self: FakeChild, count: int, deadline: float) -> bytes:
        nonlocal scored
        if self is fake.made[0] and self.written and not waited:
            waited.append(others_done.wait(LIMITS.time_s))
        data = real(self, count, deadline)
        with lock:
            scored += count != 4 and b"value" in data
            if scored >= 60 - pool_module.SLICE:
                others_done.set()
        return data

    monkeypatch.setattr(FakeChild, "read", read)
    answers = [str(number / 64) for number in range(60)]
    assert values(answers, processes=2) == [(number / 64, "r") for number in range(60)]
    assert waited == [True]


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


def test_ones_own_answers_are_scored_here_but_never_run() -> None:
    """A program is no answer that can be read: a 0 without a word would be wrong for right programs."""
    assert own_rewards([(ADD, "58"), (ADD, "59")]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="task 'code' runs programs"):
        own_rewards([(ADD, "58"), (CODE, f"```python\n{SOLUTION}\n```")])


def test_no_program_runs_where_it_cannot_be_locked_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, not open: without the kernel's help a pool for code is not made at all."""
    monkeypatch.setattr(jail.platform, "machine", lambda: "riscv64")
    with pytest.raises(jail.JailUnavailable, match="can only be run"):
        ScorerPool(["code"])
    with pytest.raises(jail.JailUnavailable, match="riscv64"):
        jail.lock(jail.Access.NOTHING)
