"""The simulated network against real TCP: namespaces, lines shaped by tbf, the kernel's own congestion control."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_completion_times_hold_against_the_kernel(tmp_path: Path) -> None:
    """Shared bottlenecks of 2 to 8 flows, late joiners, asymmetric lines: within 5 % on completion times."""
    command = [sys.executable, "-m", "experiments.accuracy.kernel", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode == 2:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["case"]: row for row in json.loads((tmp_path / "kernel.json").read_text())}
    for name in ("2", "4", "8"):
        assert rows[f"{name} share an uplink"]["error_each"] <= 0.05
    for name in ("late joiners", "unequal downlinks", "asymmetric lines, one way and then the other"):
        assert rows[name]["error_each"] <= 0.05
    assert rows["40 ms round trip"]["error_each"] <= 0.05
    assert rows["4 share by loss"]["error_last"] <= 0.05
    # what was predicted is arithmetic: 22 MB over 40 Mbit/s, of which 1448 in 1514 bytes are payload
    assert rows["2 share an uplink"]["predicted_s"] == [pytest.approx(22 / (5 * 1448 / 1514), abs=1e-3)] * 2
