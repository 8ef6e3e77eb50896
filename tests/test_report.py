"""The report in a real browser: it loads without an error or a request to anywhere, and shows the summary's numbers."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sim.report import percent, write_report
from sim.run import RunResult, run_scenario
from sim.scenario import load_scenario
from tests.paths import TINY_MODEL

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    scenario = load_scenario("adversarial-tiny")
    runs = tmp_path_factory.mktemp("runs")
    return run_scenario(
        scenario, name="tiny", seed=1, model_path=str(TINY_MODEL), runs=runs, say=lambda line: None, progress=False
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_loads_it_without_errors_or_outside_requests_and_sees_the_summarys_numbers(
    result: RunResult, tmp_path: Path
) -> None:
    page = result.folder / "report.html"
    log = tmp_path / "net.json"
    assert CHROMIUM is not None
    command = [
        CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}",
        "--enable-logging=stderr", "--v=0", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr
    requested = re.findall(r'"url":"(https?://[^"]+)"', log.read_text(encoding="utf-8", errors="replace"))
    assert [url for url in requested if "google" not in url and "gstatic" not in url] == []  # the browser's own
    text = html.unescape(re.sub(r"<[^>]+>", "\n", done.stdout))
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    for expected in (
        percent(summary["detection"]),
        percent(summary["false_positives"]),
        f"{summary['virtual_s']:.1f} s",
        summary["events_sha256"],
    ):
        assert expected in text, expected
    for row in summary["behaviours"]:
        cells = re.search(rf"<tr[^>]*><td>{row['behaviour']}</td>(.*?)</tr>", done.stdout)
        assert cells is not None
        values = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", cells.group(1))]
        assert values[:4] == [
            str(row["nodes"]), str(row["submissions"]), str(row["rejected"]["hits"]), percent(row["rejected"]),
        ]  # fmt: skip


def test_it_is_one_file_that_names_nothing_outside_itself(result: RunResult) -> None:
    text = (result.folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", text)
    assert "<script" not in text and "@import" not in text


def test_what_the_scenario_says_is_shown_as_text_never_as_markup(result: RunResult) -> None:

    path = result.folder / "summary.json"
    original = path.read_text(encoding="utf-8")
    try:
        summary = json.loads(original)
        summary["title"] = "<script>alert(1)</script>"
        path.write_text(json.dumps(summary), encoding="utf-8")
        text = write_report(result.folder).read_text(encoding="utf-8")
        assert "<script" not in text and "&lt;script&gt;" in text
    finally:
        path.write_text(original, encoding="utf-8")
