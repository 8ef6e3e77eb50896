"""A ring's processes as their parent starts and stops them: with small shell scripts in the place of Python."""

import os
import sys

import pytest

from refimpl.pipeline import launch
from refimpl.pipeline.launch import HUGE_PAGES, LaunchError, NodeEntry, environment, start, started

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
