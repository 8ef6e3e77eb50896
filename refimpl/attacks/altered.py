"""An engine with something changed before or after the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from refimpl.work import Work

Prompts = Sequence[Sequence[int]]


class Engine(Protocol):
    """What is wrapped: a worker's engine."""

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]: ...

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work: ...


class Altered:
    """`engine` with `before` applied to the prompts and `after` to its answers. `cheated` says which of the last call's
    answers are not what the engine would have given."""

    def __init__(
        self,
        engine: Engine,
        *,
        before: Callable[[Prompts], Prompts] = lambda prompts: prompts,
        after: Callable[[Prompts, list[Any]], list[Any]] = lambda prompts, answers: answers,
    ) -> None:
        self.engine, self._before, self._after = engine, before, after
        self.cheated: list[bool] = []

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        asked = self._before(prompts)
        given = self.engine.answer(asked, seeds)
        answers = self._after(prompts, given)
        self.cheated = [
            list(own) != list(prompt) or not _same(one, other)
            for own, prompt, one, other in zip(asked, prompts, given, answers, strict=True)
        ]
        return answers

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        return self.engine.work(self._before(prompts), answers)


def _same(one: Any, other: Any) -> bool:
    """Equal tokens with equal proofs and states."""
    if one is other:
        return True
    states = (one.states is None) == (other.states is None) and (one.states is None or one.states.equal(other.states))
    return np.array_equal(one.tokens, other.tokens) and one.proofs == other.proofs and states
