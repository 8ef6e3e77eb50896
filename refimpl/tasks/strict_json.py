"""Strict JSON: an answer that a program could read without asking back.

The model is given facts in words and a schema; it must return the facts as JSON that obeys the schema to the letter.
The parser here is stricter than most: no duplicate keys, no NaN, no number or nesting beyond bounds, nothing before or
after. It is also what reads the output of jailed programs, so no input may make it slow or deep.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from refimpl.tasks.problem import Split, final_answer, last_fenced_block

NAMES = ("Aino", "Bram", "Chidi", "Dalia", "Emre", "Farah", "Goran", "Hana", "Ines", "Jomo", "Keiko", "Luca", "Mina")
CITIES = ("Accra", "Bergen", "Cusco", "Dakar", "Essen", "Fes", "Ghent", "Hilo", "Izmir", "Jaipur", "Kobe", "Lagos")
COLOURS = ("red", "green", "blue", "black", "white")
HOBBIES = ("chess", "rowing", "baking", "climbing", "pottery", "birding", "fencing", "knitting")


class BadJson(ValueError):
    """Why a text is not strict JSON. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def parse_strict(text: str, *, characters_max: int = 65_536, depth_max: int = 32, digits_max: int = 64) -> Any:
    """The JSON value of `text`, or BadJson. Takes time in proportion to the text, whatever it holds."""
    if len(text) > characters_max:
        raise BadJson(f"{len(text)} characters, at most {characters_max} are read")
    if _depth(text) > depth_max:
        raise BadJson(f"nested more than {depth_max} deep")

    def number(digits: str) -> float | int:
        if len(digits) > digits_max:
            raise BadJson(f"a number of {len(digits)} characters")
        value = float(digits) if any(mark in digits for mark in ".eE") else int(digits)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadJson("a number too large")
        return value

    def constant(name: str) -> Any:
        raise BadJson(f"{name} is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise BadJson("a key occurs twice")
        return found

    try:
        return json.loads(text, parse_int=number, parse_float=number, parse_constant=constant, object_pairs_hook=pairs)
    except (json.JSONDecodeError, RecursionError, UnicodeError) as error:
        raise BadJson(f"not JSON: {type(error).__name__} at {getattr(error, 'pos', '?')}") from None


def _depth(text: str) -> int:
    """How deep brackets nest, at most. Brackets in strings do not count."""
    depth = deepest = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def same(one: Any, other: Any) -> bool:
    """Equal in value and type: 1 is not true, and 2.0 is not 2."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def obeys(value: Any, schema: dict[str, Any], path: str = "the answer") -> str:
    """What is wrong with `value` by `schema`, and where; empty where it obeys. The part of JSON Schema used here: type,
    properties (all required, no others), items, minItems, maxItems, enum, minimum, maximum."""
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    }  # fmt: skip
    kind = schema["type"]
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return f"{path} is no {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{path} is none of {schema['enum']}"
    if kind in ("integer", "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{path} is out of range"
    if kind == "object":
        for name in schema["properties"]:
            if name not in value:
                return f"{path} lacks {name!r}"
        if len(value) > len(schema["properties"]):
            return f"{path} has fields that were not asked for"
        wrong = (obeys(value[name], part, f"{path}.{name}") for name, part in schema["properties"].items())
        return next((reason for reason in wrong if reason), "")
    if kind == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{path} has {len(value)} items"
        wrong = (obeys(item, schema["items"], f"{path}[{i}]") for i, item in enumerate(value))
        return next((reason for reason in wrong if reason), "")
    return ""


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _fields(rng: np.random.Generator, name: str) -> list[tuple[str, dict[str, Any], Any, str]]:
    """(field, its schema, its value, the sentence that states it), plain ones first."""

    def one_of(values: tuple[str, ...]) -> str:
        return values[int(rng.integers(len(values)))]

    age, height = int(rng.integers(18, 90)), round(float(rng.integers(150, 200)) / 100 + 0.001, 3)
    city, street, zip_code = one_of(CITIES), int(rng.integers(1, 200)), str(rng.integers(10_000, 99_999))
    hobbies = [HOBBIES[i] for i in rng.permutation(len(HOBBIES))[: int(rng.integers(1, 4))]]
    member, colour, scores = bool(rng.integers(2)), one_of(COLOURS), [int(n) for n in rng.integers(0, 100, 3)]
    text, number = {"type": "string"}, {"type": "integer", "minimum": 0}
    return [
        ("name", text, name, f"This is about {name}."),
        ("age", number, age, f"{name} is {age} years old."),
        ("member", {"type": "boolean"}, member, f"{name} is {'a' if member else 'not a'} member."),
        ("colour", {"type": "string", "enum": list(COLOURS)}, colour, f"{name}'s colour is {colour}."),
        ("height_m", {"type": "number", "minimum": 0}, height, f"{name} is {height} metres tall."),
        (
            "hobbies",
            {"type": "array", "items": text, "minItems": 1},
            hobbies,
            f"{name}'s hobbies are, in this order: {', '.join(hobbies)}.",
        ),
        (
            "address",
            _object({"city": text, "number": number, "zip": text}),
            {"city": city, "number": street, "zip": zip_code},
            f"{name} lives in {city}, house number {street}, zip code {zip_code}.",
        ),
        (
            "scores",
            {"type": "array", "items": number, "minItems": 3, "maxItems": 3},
            scores,
            f"{name}'s scores were {scores[0]}, then {scores[1]}, then {scores[2]}.",
        ),
    ]


def record(rng: np.random.Generator, level: int, split: Split) -> tuple[str, dict[str, Any]]:
    """Level n asks for n + 2 fields, the nested ones last; the test split is about names that training never sees."""
    names = NAMES[:3] if split == "test" else NAMES[3:]
    fields = _fields(rng, names[int(rng.integers(len(names)))])[: level + 2]
    schema = _object({name: part for name, part, _, _ in fields})
    sentences = " ".join(fields[i][3] for i in rng.permutation(len(fields)))
    prompt = (
        f"{sentences}\n\nReturn these facts as one JSON object that obeys this schema, and nothing else:\n"
        f"{json.dumps(schema)}"
    )
    return prompt, {"schema": schema, "value": {name: value for name, _, value, _ in fields}}


def verify(reference: Any, answer: str) -> tuple[float, str]:
    """The whole answer, or its one fenced block, is strict JSON, obeys the schema, and states the facts."""
    text = final_answer(answer)
    block = last_fenced_block(text, "json") if text.startswith("```") and text.endswith("```") else None
    try:
        value = parse_strict(text if block is None else block.strip())
    except BadJson as error:
        return 0.0, error.args[0]
    wrong = obeys(value, reference["schema"])
    if wrong:
        return 0.0, wrong
    # types hold by now; 2.0 will do for a number 2, as JSON has one kind of number
    return (1.0, "") if value == reference["value"] else (0.0, "another value than the text states")
