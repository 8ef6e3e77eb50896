"""The validator's own part: what it does with a stranger's file, whoever inspects it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from refimpl.grpo.messages import Offer, SlotGiven
from refimpl.grpo.validator import Finding, Validator, ValidatorConfig
from refimpl.identity import Identity
from refimpl.messages import Blob
from refimpl.work import Seconds, Work

SLOT = SlotGiven(index=3, folder=2, checkpoint=0, counter=1, place=1)
OFFER = Offer("ab" * 32, SLOT, "key", Blob(3, "key", b"PAR"))


class OneDevice:
    """A world whose device says when it is at work."""

    def __init__(self) -> None:
        self.computing, self.priced = False, []  # type: bool, list[Work]

    def now(self) -> float:
        return 0.0

    def signal(self) -> None:
        return None

    async def compute(self, work: Any, fn: Callable[[], Any]) -> Any:
        self.computing = True
        try:
            result = fn()
        finally:
            self.computing = False
        self.priced.append(work(result) if callable(work) else work)
        return result


class Weights:
    def held(self) -> list[int]:
        return [2]


class Inspector:
    """Notes where it was called; `fails` there."""

    def __init__(self, world: OneDevice, fails: str = "") -> None:
        self.world, self.fails, self.called = world, fails, []  # type: OneDevice, str, list[tuple[str, bool]]

    def _at(self, what: str) -> None:
        self.called.append((what, self.world.computing))
        if what == self.fails:
            raise RuntimeError("a reader that breaks")

    def version_of(self, offer: Offer) -> int:
        self._at("version_of")
        return 2

    def inspect(self, offer: Offer) -> Finding:
        self._at("inspect")
        return Finding(code="ok", reason="", rows=1)

    def work(self, finding: Any) -> Work:
        return Seconds(duration_s=7.0)


def check(world: Any, inspector: Inspector) -> Finding:
    me = Identity.from_seed(0, "validator")
    config = ValidatorConfig(trainer="trainer")
    validator = Validator(world, config, me, inspector, Weights(), key_of=lambda file: file.content_id)  # type: ignore[arg-type]
    return asyncio.run(validator._check(OFFER))


def test_a_strangers_file_is_read_on_the_device_and_never_on_the_event_loop() -> None:
    """Both times, for its version and for the check; the reading is paid with the check."""
    world = OneDevice()
    inspector = Inspector(world)
    assert check(world, inspector).code == "ok"
    assert inspector.called == [("version_of", True), ("inspect", True)]
    assert world.priced == [Seconds(duration_s=0.0), Seconds(duration_s=7.0)]


@pytest.mark.parametrize("where", ["version_of", "inspect"])
def test_a_check_that_breaks_is_no_verdict(where: str) -> None:
    world = OneDevice()
    finding = check(world, Inspector(world, fails=where))
    assert (finding.code, finding.decided) == ("no_verdict", False) and "a reader that breaks" in finding.reason
