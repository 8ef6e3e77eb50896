"""Why: who wrote a file by hand reads why it was refused; each fault is one sentence: file, field, value, expectation.

Pydantic finds what is wrong; these are its findings in plain words. A field that is not known is held against those
that there are, first against those that are missing, since `uplink_gbit_s` was meant to be `uplink_mbit_s`. One fault
in several groups of nodes is told once, with their names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

Step = int | str
NAMED = "\0"
"""Stands for the entry with a name, in a place."""


@dataclass(frozen=True)
class _Fault:
    place: tuple[str, ...]  # with NAMED where entries are told apart by name
    said: str  # what comes after the place


def explain(error: ValidationError, model: type[BaseModel], raw: Mapping[str, Any], file: str) -> str:
    """Pydantic's findings as sentences, a line each: file, field (devices and nodes by their names), value, what was
    expected."""
    found: dict[_Fault, list[str]] = {}
    for steps, said in _told(error, model):
        where, name = _place(steps, raw)
        found.setdefault(_Fault(where, said), []).append(name)
    lines = []
    for fault, names in found.items():
        place = " ".join(", ".join(dict.fromkeys(names)) if step == NAMED else step for step in fault.place)
        lines.append(f"{file}: {place}{fault.said if place else fault.said.lstrip(': ')}")
    return "\n".join(dict.fromkeys(lines))


def _told(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[tuple[Step, ...], str]]:
    """Each fault: where, and what is to be said of it; a missing field and the unknown one in its place are one."""
    findings = error.errors()
    missing = [finding["loc"] for finding in findings if finding["type"] == "missing"]
    meant: dict[tuple[Step, ...], str] = {}  # unknown field -> the missing one
    for finding in findings:
        if finding["type"] == "extra_forbidden":
            *part, name = finding["loc"]
            free = [str(loc[-1]) for loc in missing if list(loc[:-1]) == part]
            if (near := difflib.get_close_matches(str(name), free, n=1, cutoff=0.5)) != []:
                meant[finding["loc"]] = near[0]
                missing.remove((*part, near[0]))
    for finding in findings:
        loc, value = finding["loc"], finding["input"]
        if finding["type"] == "extra_forbidden":
            shown = f" = {value!r}" if _short(value) else ""
            yield loc, f"{shown} is no field here{_hint(model, loc, meant.get(loc))}"
        elif finding["type"] != "missing":
            message = finding["msg"].removeprefix("Value error, ")
            whole = finding["type"] == "value_error" and isinstance(value, (Mapping, list, tuple))
            yield loc, f"{f' is {value!r}' if _short(value) and not whole else ''}: {message}"
        elif loc in missing:
            yield loc, " is missing, and required"


def _hint(model: type[BaseModel], loc: Sequence[Step], missing: str | None) -> str:
    """The field that was meant, or those that there are."""
    if missing is not None:
        return f"; did you mean {missing}, which is missing?"
    part = model
    for step in loc[:-1]:  # a place in a list or a key of a table leads to no other part
        if step in part.model_fields:
            part = _part_in(part.model_fields[str(step)].annotation) or part
    near = difflib.get_close_matches(str(loc[-1]), part.model_fields, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; expected some of {', '.join(part.model_fields)}"


def _part_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in an annotation such as `tuple[NodeGroup, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((part for inner in get_args(annotation) if (part := _part_in(inner)) is not None), None)


def _place(steps: Sequence[Step], raw: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The place in words, and the name of the first entry on the way that has one."""
    place: list[str] = []
    name, node = "", raw
    for step in steps:
        node = node[step] if isinstance(node, (list, tuple)) and isinstance(step, int) else _get(node, step)
        named = isinstance(step, int) and isinstance(node, Mapping) and "name" in node
        if named and not name:
            name = repr(node["name"])
            place.append(NAMED)
        else:
            place.append(repr(node["name"]) if named else str(step))
    return tuple(place), name


def _get(node: Any, step: Step) -> Any:
    return node.get(step) if isinstance(node, Mapping) else None


def _short(value: object) -> bool:
    return len(repr(value)) < 60
