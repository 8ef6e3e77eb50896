"""Why: a run with one node more must treat all others as before; so no two messages share a stream of random numbers.

What chance does to a message is a hash of the run's seed, who sends it to whom, and when; nothing is kept per pair.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

MASK = (1 << 64) - 1


class Uniform(Protocol):
    """Where uniform numbers come from: a `Chance`, or a numpy `Generator`."""

    def random(self) -> float:
        """The next number, 0 or more and below 1."""
        ...


def number_of(*names: str) -> int:
    """64 bits that stand for these names."""
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest(), "little")


class Chance:
    """The random numbers of one message after another. Steele, Lea, Flood, OOPSLA 2014 ("SplitMix64"): a counter in
    steps of the golden ratio, scrambled; here it begins at a sum of odd multiples of the channel, time and ordinal."""

    __slots__ = ("_now_ns", "_ordinals", "_seed", "_state")

    def __init__(self, seed: int) -> None:
        self._seed = self._state = number_of("network", str(seed))
        self._now_ns = -1
        self._ordinals: dict[int, int] = {}  # channel -> its messages in this instant

    def of(self, channel: int, now_ns: int) -> Chance:
        """From now on, the numbers of the channel's next message at this instant. Returns itself."""
        if now_ns != self._now_ns:
            self._now_ns = now_ns
            self._ordinals.clear()
        ordinal = self._ordinals[channel] = self._ordinals.get(channel, 0) + 1
        mixed = channel * 0xD1342543DE82EF95 + now_ns * 0xDABA0B6EB09322E3 + ordinal * 0xAEF17502108EF2D9
        self._state = (self._seed ^ mixed) & MASK
        return self

    def random(self) -> float:
        """Uniform, 0 or more and below 1, of 53 bits."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53
