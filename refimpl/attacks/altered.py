"""An engine with something changed before or after the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from refimpl.work import Work

Prompts = Sequence[Sequence[int]]


class Engine(Protocol):
    """What is wrapped: a worker's engine."""

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]: ...

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work: ...


class Altered:
    """`engine` with `before` applied to the prompts and `after` to its answers."""

    def __init__(
        self,
        engine: Engine,
        *,
        before: Callable[[Prompts], Prompts] = lambda prompts: prompts,
        after: Callable[[Prompts, list[Any]], list[Any]] = lambda prompts, answers: answers,
    ) -> None:
        self.engine, self._before, self._after = engine, before, after

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        return self._after(prompts, self.engine.answer(self._before(prompts), seeds))

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        return self.engine.work(self._before(prompts), answers)
