"""Requests that outlive the head: every request, token and end in an append-only file, read back after a restart.

One JSON record a line. A line that a crash cut short is the last one, and is dropped.

    {"terms": {"checkpoint", "dtype", "temperature", ...}}      what the answers are of; a head of others is refused
    {"submit": {"id", "prompt", "max_new_tokens", "seed"}}      before any work
    {"draw": [[id, token, logprob], ...]}                       as passes come round
    {"cut": {id: tokens kept}}                                  answers cut back after a complaint
    {"done": {id: reason}}
    {"epoch": n}                                                before a ring is formed
    {"ban": public key}                                         its node gets no seat again
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass(slots=True)
class Kept:
    """What is known of one request. `number` is its id inside the ring."""

    id: str
    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""  # set once it is complete


class OtherRequest(ValueError):
    """What is asked for is not what the record has under this name. Takes exactly one argument: the sentence."""


class RequestLog:
    """All requests of a head, in memory and, given a path, on disk."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.requests: dict[str, Kept] = {}
        self.by_number: dict[int, Kept] = {}
        self.epoch = 0  # of the last ring that was formed, or tried
        self.terms: dict[str, Any] = {}
        self.banned: set[str] = set()  # public keys
        self.name = "in memory" if path is None else str(path)
        self._file: TextIO | None = None
        if path is not None:
            target = Path(path)
            whole = self._read(target) if target.exists() else 0
            self._file = target.open("a", encoding="utf-8")
            self._file.truncate(whole)

    def _read(self, path: Path) -> int:
        """Read all whole records; returns where they end."""
        whole = 0
        with path.open("rb") as lines:
            for line in lines:
                try:
                    record = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    record = None
                if not isinstance(record, dict):
                    break
                self._apply(record)
                whole += len(line)
        return whole

    def _apply(self, record: dict[str, Any]) -> None:
        for kind, value in record.items():
            if kind == "submit":
                kept = Kept(
                    value["id"], len(self.requests), tuple(value["prompt"]), value["max_new_tokens"], value["seed"]
                )
                self.requests[kept.id] = self.by_number[kept.number] = kept
            elif kind == "draw":
                for number, token, logprob in value:
                    self.by_number[number].answer.append(token)
                    self.by_number[number].logprobs.append(logprob)
            elif kind == "cut":
                for number, count in value.items():
                    del self.by_number[int(number)].answer[count:], self.by_number[int(number)].logprobs[count:]
            elif kind == "epoch":
                self.epoch = value
            elif kind == "ban":
                self.banned.add(value)
            elif kind == "terms":
                self.terms = value
            elif kind == "done":
                for number, reason in value.items():
                    self.by_number[int(number)].reason = reason

    def _write(self, record: dict[str, Any]) -> None:
        self._apply(record)
        if self._file is not None:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()

    def agree(self, terms: dict[str, Any]) -> None:
        """All answers on the record are made on these terms (plain JSON values). Raises `OtherRequest` where those that
        it has were made on others."""
        if not self.terms:
            self._write({"terms": terms})
        for name, value in terms.items():
            if self.terms.get(name) != value:
                raise OtherRequest(
                    f"record {self.name}: its answers have {name} {self.terms.get(name)!r}, here it is {value!r}"
                )

    def compare(self, request_id: str, prompt: Sequence[int], max_new_tokens: int, seed: int) -> bool:
        """Is this request on the record? Raises `OtherRequest` where another one has its id."""
        kept = self.requests.get(request_id)
        if kept is None:
            return False
        for name, value in {"prompt": tuple(prompt), "max_new_tokens": max_new_tokens, "seed": seed}.items():
            if getattr(kept, name) != value:
                raise OtherRequest(
                    f"record {self.name}: request {request_id!r} is there with {name} {_short(getattr(kept, name))}, "
                    f"now {_short(value)} is asked for"
                )
        return True

    def submit(self, request_id: str, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Kept:
        """A new request, or the same one if it was submitted already. Raises `OtherRequest` as `compare` does."""
        if not self.compare(request_id, prompt, max_new_tokens, seed):
            fields = {"id": request_id, "prompt": list(prompt), "max_new_tokens": max_new_tokens, "seed": seed}
            self._write({"submit": fields})
        return self.requests[request_id]

    def draw(self, drawn: Sequence[tuple[int, int, float]]) -> None:
        """Tokens of one pass: (number, token, log-probability)."""
        if drawn:
            self._write({"draw": [list(item) for item in drawn]})

    def cut(self, kept: dict[int, int]) -> None:
        """Answers keep only so many tokens."""
        changed = {number: count for number, count in kept.items() if count < len(self.by_number[number].answer)}
        if changed:
            self._write({"cut": {str(number): count for number, count in changed.items()}})

    def done(self, number: int, reason: str) -> None:
        """A request is complete."""
        self._write({"done": {str(number): reason}})

    def begin(self, epoch: int) -> None:
        """A ring of this epoch is about to be formed: no later head may use the number again."""
        self._write({"epoch": epoch})

    def ban(self, public_key: str) -> None:
        """A verdict has fallen on this key."""
        self._write({"ban": public_key})

    def unfinished(self) -> list[Kept]:
        """Requests to go on with, oldest first."""
        return [kept for kept in self.requests.values() if not kept.reason]


def _short(value: Any) -> str:
    """For a sentence: the first 80 characters."""
    said = str(value)
    return said if len(said) <= 80 else f"{said[:80]}..."
