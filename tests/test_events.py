"""`sim/EVENTS.md` documents every kind of event, with its fields: those that the code can say, whether a test runs it
or not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import sim

ROOT = Path(sim.__file__).parent.parent
SAYS = {"journal": 0, "record": 1}  # how the code speaks: by name, and how many positional arguments follow the kind


def documented() -> dict[str, list[frozenset[str]]]:
    """Kind -> its fields, once for each table in which it stands."""
    text = (ROOT / "sim" / "EVENTS.md").read_text(encoding="utf-8")
    found: dict[str, list[frozenset[str]]] = {}
    for kind, fields in re.findall(r"^\| `([^`]+)` \|[^|]*\| ([^|]*) \|", text, re.MULTILINE):
        found.setdefault(kind, []).append(frozenset(re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", fields))))
    return found


def said() -> Iterator[tuple[str, str, frozenset[str], bool]]:
    """(where, kind, fields, whether there are more by **) of every call in the code that writes an event."""
    for path in sorted([*ROOT.glob("refimpl/**/*.py"), *ROOT.glob("sim/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            kind = node.args[0]
            if name in SAYS and isinstance(kind, ast.Constant) and len(node.args) == 1 + SAYS[name]:
                fields = frozenset(word.arg for word in node.keywords if word.arg is not None)
                yield f"{path.relative_to(ROOT)}:{node.lineno}", kind.value, fields, len(fields) < len(node.keywords)


def test_every_event_that_the_code_can_write_is_documented_with_its_fields() -> None:
    table, seen = documented(), set()
    for where, kind, fields, more in said():
        assert kind in table, f"{where}: {kind} is not in EVENTS.md"
        right = [known for known in table[kind] if fields == known or (more and fields < known)]
        assert right, f"{where}: {kind} has {sorted(fields)}; EVENTS.md says {[sorted(f) for f in table[kind]]}"
        seen.add(kind)
    assert {"up", "fault", "compute", "judged", "cut_off", "wrong_shard", "ring up", "verdict"} <= seen


def test_nothing_is_documented_that_the_code_cannot_write() -> None:
    files = {name for name in documented() if "." in name}
    assert documented().keys() - files == {kind for _, kind, _, _ in said()}
