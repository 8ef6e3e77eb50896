"""Promised: "progress is never silent for more than 2 s"."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim import progress
from sim.progress import Progress
from tests.paths import TINY_MODEL

SILENT_S = 2.0


class FakeStop:
    """`threading.Event` on a clock of its own: waiting takes no time, and after so many waits it is set."""

    def __init__(self, waits: int) -> None:
        self.now_s, self.left = 0.0, waits

    def wait(self, timeout_s: float) -> bool:
        self.now_s += timeout_s
        self.left -= 1
        return self.left < 0


def test_a_line_is_drawn_at_least_every_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, stop = Progress("a run", lambda: 7.0, lambda: 0.25, {"judged": 3}), FakeStop(10)
    monkeypatch.setattr(shown, "_stop", stop)
    times_s: list[float] = [0.0]
    monkeypatch.setattr(progress, "print", lambda *a, **k: (times_s.append(stop.now_s), print(*a, **k)), raising=False)
    shown._draw()
    assert len(times_s) == 11
    assert max(b - a for a, b in itertools.pairwise(times_s)) <= SILENT_S
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and all(line.startswith("a run  25%  7.0 s virtual") for line in lines)
    assert all(line.endswith("judged 3") for line in lines)


SCRIPT = """
import json, pathlib, sys, time
from sim.run import run_scenario
from sim.scenario import check_raw, read_raw, scenario_path

class Noting:
    encoding, times = "utf-8", [time.process_time()]
    def write(self, text):
        self.times.append(time.process_time())
        return sys.__stderr__.write(text)
    def flush(self): sys.__stderr__.flush()
    def isatty(self): return False

model, runs = sys.argv[1:]
raw = read_raw(scenario_path("adversarial-tiny"))
raw["task"]["assignments"] = 6
sys.stderr = noting = Noting()
scenario = check_raw(raw, "tiny")
run_scenario(scenario, name="tiny", seed=1, model_path=model, runs=pathlib.Path(runs), say=lambda line: None)
sys.stderr = sys.__stderr__
print(json.dumps([*noting.times, time.process_time()]))
"""


@pytest.mark.slow
def test_a_whole_run_is_never_silent(tmp_path: Path) -> None:
    """Gaps are in the process's own processor time, which a busy machine does not stretch: a phase without a line, or
    one that keeps the drawing thread from its turn, is a gap in either."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(TINY_MODEL), str(tmp_path)],
        capture_output=True, text=True, check=True, env=environment, timeout=600,
    )  # fmt: skip
    times_s = json.loads(done.stdout.splitlines()[-1])
    gaps_s = [b - a for a, b in itertools.pairwise(times_s)]
    assert times_s[-1] - times_s[0] > 2 * SILENT_S, "too short to show anything"
    assert max(gaps_s) <= SILENT_S, (max(gaps_s), done.stderr)
