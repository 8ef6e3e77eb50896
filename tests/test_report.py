"""The report in a real browser: it loads without an error or a request to anywhere, and shows the summary's numbers."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sim.curves import checks_table
from sim.record import read_events
from sim.report import write_report
from sim.run import RunResult, run_scenario
from sim.scenario import load_scenario
from sim.summary import percent
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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_a_curve_per_bottleneck_and_device_class_and_every_check(result: RunResult) -> None:
    page = result.folder / "report.html"
    command = [str(CHROMIUM), *FLAGS, "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    curves = re.findall(r'<svg class="curve".*?</svg>', dom, re.DOTALL)
    drawn = {html.unescape(re.findall(r"<text[^>]*>(.*?)</text>", curve)[0]): curve for curve in curves}
    traffic = json.loads((result.folder / "traffic.json").read_text(encoding="utf-8"))
    nodes = json.loads((result.folder / "replay.json").read_text(encoding="utf-8"))["scenario"]["nodes"]
    for link in traffic["links"]:
        assert f"largest {max(link['mbit_s']):.4g} of {max(link['capacity_mbit_s']):.4g} Mbit/s" in drawn[link["name"]]
        assert f"held transfers for {link['held_s']:.4g} s" in drawn[link["name"]]
    for group in traffic["devices"]["at_work"]:
        (device,) = [node["device"] for node in nodes if node["name"] == group]
        count = sum(node.get("count", 1) for node in nodes if node["device"] == device)
        assert "devices at work" in drawn[f"{device} ({count})"]
    assert len(traffic["links"]) > 5 and len(curves) > len(traffic["links"])
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["checks"]
    for check in summary["checks"]:
        row = re.search(rf"<tr[^>]*><td>{check['checker']}</td>.*?</tr>", dom)
        assert row is not None and "<td>passed</td>" in row.group(), check["checker"]


def test_the_work_of_devices_is_what_the_log_says(result: RunResult) -> None:
    use = json.loads((result.folder / "traffic.json").read_text(encoding="utf-8"))["devices"]
    widths = [
        min(use["bin_s"], use["end_s"] - i * use["bin_s"]) for i in range(len(next(iter(use["at_work"].values()))))
    ]
    drawn_s = sum(sum(a * b for a, b in zip(busy, widths, strict=True)) for busy in use["at_work"].values())
    log = read_events(result.folder / "events.jsonl")
    assert drawn_s == pytest.approx(
        sum(e["end_ns"] - e["start_ns"] for e in log if e["kind"] == "compute") / 1e9, rel=1e-4
    )


def test_a_broken_promise_is_shown_with_its_sentence() -> None:
    table = checks_table([{"class": "crash", "checker": "c", "promise": "p", "violations": ["<a> fell", "b fell"]}])
    assert "2 violations" in table and "&lt;a&gt; fell<br>b fell" in table and 'class="cheat"' in table
