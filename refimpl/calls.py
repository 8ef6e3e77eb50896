"""Calling with patience: for what may safely be said twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refimpl.messages import Message
from refimpl.world import Timeout, Unreachable, World


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to try. Waits double from `wait_s` up to `wait_s_max`."""

    timeout_s: float = 60.0  # of one call
    attempts: int = 12
    wait_s: float = 0.5
    wait_s_max: float = 30.0


async def call_patiently(world: World, target: str, message: Message, patience: Patience) -> Any:
    """`world.call`, again after a pause while nobody answers. Only for messages whose callee counts them once.

    Raises `Refused` at once (an answer is an answer), and the last `Timeout` or `Unreachable` when patience ends.
    """
    wait_s = patience.wait_s
    for attempt in range(1, patience.attempts + 1):
        try:
            return await world.call(target, message, patience.timeout_s)
        except (Timeout, Unreachable):
            if attempt == patience.attempts:
                raise
        await world.sleep(wait_s)
        wait_s = min(2 * wait_s, patience.wait_s_max)
    raise AssertionError("attempts is 1 or more")
