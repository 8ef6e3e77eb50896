"""A ring's processes as their parent starts and stops them: with small shell scripts in the place of Python."""

import dataclasses
import itertools
import os
import sys
from pathlib import Path

import pytest

from refimpl.pipeline import launch
from refimpl.pipeline.__main__ import arguments_of, node_file, prepared
from refimpl.pipeline.launch import HUGE_PAGES, LaunchError, NodeEntry, cut, environment, even_cut, start, started
from tests.small_ring import CONFIG

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the stand-in for Python is a shell script")
SAYS = 'read -r config; echo "{\\"url\\": \\"$PYTHONMALLOC $GLIBC_TUNABLES\\"}"; exec cat > said'


def script(folder, name, body):
    """A command that does `body`, whatever its arguments."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncd {folder}\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's tunables")
@pytest.mark.parametrize("given", [None, "glibc.malloc.arena_max=2"])
def test_a_child_here_gets_the_tunables_and_keeps_those_that_are_set(tmp_path, monkeypatch, given):
    """Its heap in huge pages, beside what the user chose."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    with started([NodeEntry(name="a", python=script(tmp_path, "python", SAYS))], [{}]) as (child,):
        assert child.url == f"malloc {given + ':' if given else ''}{HUGE_PAGES}"
    assert child.process.returncode == 0 and child.process.stdout.closed
    assert '"book": {"a": "malloc' in (tmp_path / "said").read_text()


def test_elsewhere_a_child_gets_nothing(tmp_path, monkeypatch):
    """On no Linux there is no glibc; and what a command starts on another machine is not ours to set."""
    assert environment({"GLIBC_TUNABLES": "x"}, "darwin") == {} == environment({}, "win32")
    monkeypatch.delenv("PYTHONMALLOC", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    command = (script(tmp_path, "ssh", SAYS), "there")
    with started([NodeEntry(name="a", command=command)], [{}]) as (child,):
        assert child.url == " "


def test_a_command_that_is_missing_is_one_sentence_and_the_others_stop(tmp_path, monkeypatch):
    """No traceback, no orphan."""
    children = []
    monkeypatch.setattr(launch, "start", lambda entry: children.append(start(entry)) or children[-1])
    entries = [NodeEntry(name="a", python=script(tmp_path, "python", SAYS)), NodeEntry(name="b", python="/no/python")]
    with pytest.raises(LaunchError) as raised, started(entries, [{}, {}]):
        pass
    assert str(raised.value) == "node 'b': cannot run '/no/python': No such file or directory"
    assert [child.process.poll() for child in children] != [None] and children[0].process.stdout.closed


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("exit 3", "node 'a' ended with code 3"),
        ("read -r config; echo hello; exec cat > said", "node 'a' said 'hello.n', expected a JSON object"),
        ("read -r config; echo '[1]'; exec cat > said", "expected a JSON object"),
    ],
)
def test_a_child_that_ends_or_talks_nonsense_is_one_sentence(tmp_path, body, says):
    with (
        pytest.raises(LaunchError, match=says),
        started([NodeEntry(name="a", python=script(tmp_path, "python", body))], [{"unread": "x" * 200_000}]),
    ):
        pass


def test_a_child_that_has_ended_hears_nothing_more(tmp_path):
    with started([NodeEntry(name="a", python=script(tmp_path, "python", SAYS))], [{}]) as (child,):
        child.process.kill()
        child.process.wait()
        with pytest.raises(LaunchError, match="node 'a' hears nothing more: "):
            child.say({"book": {}})


def test_a_child_that_will_not_stop_is_killed_and_reaped(tmp_path, monkeypatch):
    """No zombie, no open pipe."""
    monkeypatch.setattr(launch, "STOP_S", 0.1)
    body = 'read -r config; echo "{\\"url\\": \\"u\\"}"; exec sleep 60'
    with started([NodeEntry(name="a", python=script(tmp_path, "python", body))], [{}]) as (child,):
        assert child.url == "u"
    assert child.process.returncode == -9 and child.process.stdout.closed


# -------------------------------------------------------------------------------------------------------- the cut
NEAR, FAR = {"name": "a", "layer_ms": 1.0}, {"name": "b", "layer_ms": 10.0, "latency_ms": 100.0}


@pytest.mark.parametrize(
    ("far", "micro_batches", "objective", "stages"),
    [
        ({}, 1, "throughput", [("a", 30)]),  # alone 30 ms; any layer on b costs 200 ms of line
        ({}, 7, "throughput", [("a", 30)]),  # alone 210 ms, with b 29 + 10 + 200 at best
        ({}, 16, "throughput", [("a", 28), ("b", 2)]),  # alone 480 ms, with b 16 x 28
        ({}, 16, "latency", [("a", 30)]),
        ({"latency_ms": 0.0}, 1, "throughput", [("a", 30)]),
        ({"latency_ms": 0.0}, 2, "throughput", [("a", 28), ("b", 2)]),  # alone 60 ms, with b 2 x 28
        ({"downlink_mbit_s": 0.1}, 16, "throughput", [("a", 30)]),  # 8 x 24 x 4 bytes: 61 ms of line, 16 times
        ({"uplink_mbit_s": 0.1}, 16, "throughput", [("a", 28), ("b", 2)]),  # only tokens go that way
        ({"memory_gb": 1e-9}, 16, "throughput", [("a", 30)]),
    ],
)
def test_the_cut_is_the_best_for_what_is_asked(far, micro_batches, objective, stages):
    """Micro-batches, latency and rate of the lines decide whether a slow, far node is worth its hop."""
    nodes = [NodeEntry(**NEAR), NodeEntry(**(FAR | far))]
    found = cut(
        dataclasses.replace(CONFIG, layers=30),
        nodes,
        rows=8,
        micro_batches=micro_batches,
        capacity_tokens=64,
        dtype="float32",
        objective=objective,
    )
    assert [(stage.device, stage.end - stage.first) for stage in found.stages] == stages and found.exact


def test_equal_stages_hold_every_layer_once():
    nodes = [NodeEntry(name=str(at)) for at in range(9)]
    for count in range(1, 10):
        edges = [0, *even_cut(CONFIG, nodes[:count])]
        held = [end - first for first, end in itertools.pairwise(edges)]
        assert sum(held) == CONFIG.layers and len(held) == min(count, CONFIG.layers) and max(held) - min(held) <= 1


def test_the_command_passes_on_what_the_cut_is_for(tmp_path, capsys):
    """From its options and the node file to the partition, and what came of it to the user."""
    file = tmp_path / "ring.toml"
    tiny = Path(__file__).parent / "data" / "tiny-model"
    file.write_text(f'model = "{tiny}"\n[[node]]\nname = "a"\n[[node]]\nname = "b"\nlayer_ms = 2.0\nlatency_ms = 1.0\n')
    for more, edges in (
        (["--micro-batches", "1"], [5]),  # 5 ms
        (["--micro-batches", "4"], [4, 5]),  # 4 x 4 ms, alone 20 ms
        (["--micro-batches", "4", "--objective", "latency"], [5]),
    ):
        options = arguments_of().parse_args(["--nodes", str(file), *more])
        entries, configs = prepared(options, node_file(options), [[1]])
        assert configs[0]["ring"]["cuts"] == edges and [entry.name for entry in entries] == ["a", "b"]
    said = capsys.readouterr().out
    assert "cut for throughput with 1 x 8 sequences: cycle 5 ms, one token 5 ms" in said and "; without b" in said
    assert "cut for throughput with 4 x 8 sequences: cycle 16 ms, one token 8 ms" in said
    assert "cut for latency with 4 x 8 sequences: cycle 5 ms" in said
