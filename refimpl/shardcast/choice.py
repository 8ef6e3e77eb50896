"""Which relay to ask for the next shard: the original's rule, and a better one beside it.

Both are told what happened and asked what to do; neither has a clock or chance of its own:

    policy.begin(relay, now_s, size_bytes)                      a transfer has started
    policy.observe(relay, bytes_received, duration_s, ok, ...)  it has ended, well or not
    policy.release(relay)                                       it has ended, and says nothing about the relay
    policy.choose(rng, now_s, candidates, size_bytes)           the relay to ask next

`MovingAverage` is the rule of the published package (shardcast 0.3.2, client.py): bandwidth b_i in MB/s (10^6 byte/s),
success q_i, both moving averages with weight 0.3; relay i is drawn with probability

    P(i) = q_i b_i / Σ_j q_j b_j

and after every attempt on any relay all q rise by 0.01 ("healing"), so that a dead relay is tried again now and then.
`failures="published"` keeps its quirk: a failure passes the time-out of 30 (s) where 30 (MB/s) is understood, so a slow
relay that fails is then believed to be fast. `failures="fixed"` passes what really arrived, and never raises b_i.

`ExpectedFinish` asks the relay from which the shard is expected first. It differs from the original: 1) round trip and
own transfers in flight count, not bandwidth alone; 2) how uncertain an estimate is counts too, and grows while a relay
is not used, so that exploring costs little where it cannot pay; 3) the best relay is taken, not drawn in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

ALPHA = 0.3  # weight of the newest sample
HEAL = 0.01  # added to every success rate after every attempt
TIMEOUT_S = 30.0
MEGABYTE = 1e6


class RelayChoice(Protocol):
    """What a client needs of a policy."""

    def begin(self, relay: str, now_s: float, size_bytes: int) -> None: ...

    def observe(
        self,
        relay: str,
        bytes_received: int,
        duration_s: float,
        ok: bool,
        *,
        now_s: float = 0.0,
        first_byte_s: float | None = None,
    ) -> None:
        """A transfer has ended. `first_byte_s`: from the request to the first byte, when known."""
        ...

    def release(self, relay: str) -> None: ...

    def choose(self, rng: np.random.Generator, now_s: float, candidates: Sequence[str], size_bytes: int) -> str: ...

    def expected_s(self, relay: str, now_s: float, size_bytes: int) -> float:
        """Seconds until `size_bytes` asked of `relay` now would have arrived, by the present estimates."""
        ...


@dataclass
class _Averages:
    bandwidth_mb_s: float  # 10^6 byte/s
    success: float


class MovingAverage:
    """The original's rule. A relay's first sample sets b and q (the original probes each relay once before it starts);
    relays without a sample are asked first, in order. A single relay is taken whatever its weight, where the original
    would end with an error once that is zero."""

    def __init__(self, *, failures: Literal["published", "fixed"] = "fixed", timeout_s: float = TIMEOUT_S) -> None:
        if failures not in ("published", "fixed"):
            raise ValueError(f"failures is {failures!r}, 'published' or 'fixed' was expected")
        self._failures, self._timeout_s = failures, timeout_s
        self._of: dict[str, _Averages] = {}

    def begin(self, relay: str, now_s: float, size_bytes: int) -> None:
        """Not used by this rule."""

    def release(self, relay: str) -> None:
        """Not used by this rule."""

    def observe(
        self,
        relay: str,
        bytes_received: int,
        duration_s: float,
        ok: bool,
        *,
        now_s: float = 0.0,
        first_byte_s: float | None = None,
    ) -> None:
        sample = bytes_received / max(duration_s, 1e-9) / MEGABYTE
        if not ok and self._failures == "published":
            sample = self._timeout_s  # the quirk: seconds for MB/s
        known = self._of.get(relay)
        if known is None:
            self._of[relay] = _Averages(sample, 1.0 if ok else 0.0)
            return
        if not ok and self._failures == "fixed":
            sample = min(sample, known.bandwidth_mb_s)
        known.bandwidth_mb_s = ALPHA * sample + (1 - ALPHA) * known.bandwidth_mb_s  # b ← 0.3 x + 0.7 b
        known.success = ALPHA * (1.0 if ok else 0.0) + (1 - ALPHA) * known.success  # q ← 0.3 [success] + 0.7 q
        for other in self._of.values():
            other.success = min(1.0, other.success + HEAL)

    def estimate(self, relay: str) -> tuple[float, float]:
        """(b in MB/s, q) of a relay that has been observed."""
        known = self._of[relay]
        return known.bandwidth_mb_s, known.success

    def shares(self, candidates: Sequence[str]) -> list[float]:
        """P(i) for each candidate. When all weights are zero: "published" raises ValueError, "fixed" draws evenly."""
        weights = [self._of[relay].success * self._of[relay].bandwidth_mb_s for relay in candidates]
        total = sum(weights)
        if total <= 0 and self._failures == "fixed" and weights:
            return [1 / len(weights)] * len(weights)
        if total <= 0:
            raise ValueError(f"all {len(weights)} relays have weight zero: none has ever delivered a byte")
        return [weight / total for weight in weights]

    def choose(self, rng: np.random.Generator, now_s: float, candidates: Sequence[str], size_bytes: int) -> str:
        for relay in candidates:
            if relay not in self._of or len(candidates) == 1:  # one of one is no choice, whatever its weight
                return relay
        point = rng.random()
        for relay, share in zip(candidates, self.shares(candidates), strict=True):
            point -= share
            if point < 0:
                return relay
        return candidates[-1]

    def expected_s(self, relay: str, now_s: float, size_bytes: int) -> float:
        known = self._of.get(relay)
        if known is None or known.bandwidth_mb_s <= 0:
            return math.inf
        return size_bytes / (known.bandwidth_mb_s * MEGABYTE)


@dataclass(frozen=True, kw_only=True)
class Beliefs:
    """What `ExpectedFinish` assumes before it has seen anything, and how fast it forgets."""

    rate_bytes_per_s: float = 20e6  # of a relay never used
    rate_spread: float = 1.5  # standard deviation of ln(rate) of a relay never used: a factor of 4.5 either way
    drift_per_s: float = 0.008  # growth of the variance of ln(rate): a factor of 2 in a minute is one deviation
    noise: float = 0.3  # standard deviation of ln(one measured rate)
    rtt_s: float = 0.1  # until measured
    failure_cost_s: float = 2.0  # what a failed attempt costs beyond its own time
    memory: float = 0.9  # weight that past successes and failures keep at each new one


@dataclass
class _Belief:
    """ln(rate) ~ N(mean, variance), as of `at_s`."""

    mean: float
    variance: float
    at_s: float
    rtt_s: float
    good: float = 0.0
    bad: float = 0.0
    in_flight: int = 0
    crowd: float = 0.0  # running mean of transfers in flight, own included: what a measured rate was shared by


class ExpectedFinish:
    """Ask the relay from which the shard is expected first:

        T_i = rtt_i + s (k_i + 1) / B_i
        cost_i = T_i / p_i + (1 / p_i − 1) c

    s: shard size; k_i: own transfers in flight there, which share B_i; p_i: chance of success; c: price of a failure.
    ln B_i is followed by a one-dimensional Kalman filter (random walk, noisy samples), and B_i is *drawn* from its
    distribution at each choice (Thompson sampling): a relay is tried as often as it may well be the best.
    """

    def __init__(self, beliefs: Beliefs | None = None) -> None:
        self.beliefs = beliefs or Beliefs()
        self._of: dict[str, _Belief] = {}

    def hint(self, relay: str, *, rtt_s: float | None = None, rate_bytes_per_s: float | None = None) -> None:
        """What is known without a transfer: a measured round trip, a rate that the region or the relay's own report of
        its load lets expect. Says nothing about a relay whose rate has been measured."""
        belief = self._belief(relay)
        if rtt_s is not None:
            belief.rtt_s = rtt_s
        if rate_bytes_per_s is not None and belief.good + belief.bad == 0:
            belief.mean = math.log(rate_bytes_per_s)

    def begin(self, relay: str, now_s: float, size_bytes: int) -> None:
        belief = self._belief(relay)
        belief.in_flight += 1
        # the first of a row of transfers sets the crowd, the next ones move it
        belief.crowd = 1.0 if belief.in_flight == 1 else 0.5 * (belief.crowd + belief.in_flight)

    def observe(
        self,
        relay: str,
        bytes_received: int,
        duration_s: float,
        ok: bool,
        *,
        now_s: float = 0.0,
        first_byte_s: float | None = None,
    ) -> None:
        belief = self._belief(relay)
        if first_byte_s is not None:
            belief.rtt_s += ALPHA * (first_byte_s - belief.rtt_s)
        busy_s = max(duration_s - min(belief.rtt_s, 0.5 * duration_s), 1e-6)
        rate = max(bytes_received, 1) * max(belief.crowd, 1.0) / busy_s  # of the relay, not of one transfer
        variance = belief.variance + self.beliefs.drift_per_s * max(0.0, now_s - belief.at_s)
        gain = variance / (variance + self.beliefs.noise**2)  # K = V / (V + R)
        mean = belief.mean + gain * (math.log(rate) - belief.mean)
        if ok:
            belief.mean, belief.variance = mean, (1 - gain) * variance
        else:
            belief.mean, belief.variance = min(mean, belief.mean), variance  # a failure never raises an estimate
        belief.at_s = max(belief.at_s, now_s)
        belief.good = self.beliefs.memory * belief.good + ok
        belief.bad = self.beliefs.memory * belief.bad + (not ok)
        belief.in_flight = max(0, belief.in_flight - 1)

    def release(self, relay: str) -> None:
        belief = self._belief(relay)
        belief.in_flight = max(0, belief.in_flight - 1)

    def choose(self, rng: np.random.Generator, now_s: float, candidates: Sequence[str], size_bytes: int) -> str:
        if not candidates:
            raise ValueError("there is no relay to choose from")
        draws = rng.standard_normal(len(candidates))
        costs = [
            self._cost_s(relay, now_s, size_bytes, draw) for relay, draw in zip(candidates, draws.tolist(), strict=True)
        ]
        return candidates[costs.index(min(costs))]

    def expected_s(self, relay: str, now_s: float, size_bytes: int) -> float:
        return self._cost_s(relay, now_s, size_bytes, 0.0)

    def rate_bytes_per_s(self, relay: str) -> float:
        """The median of what the relay is believed to deliver to this client, over all its transfers."""
        return math.exp(self._belief(relay).mean)

    def _cost_s(self, relay: str, now_s: float, size_bytes: int, deviations: float) -> float:
        belief = self._belief(relay)
        variance = belief.variance + self.beliefs.drift_per_s * max(0.0, now_s - belief.at_s)
        rate = math.exp(belief.mean + deviations * math.sqrt(variance))
        finish_s = belief.rtt_s + size_bytes * (belief.in_flight + 1) / rate
        success = (belief.good + 1) / (belief.good + belief.bad + 1)  # one imagined success before the first attempt
        return finish_s / success + (1 / success - 1) * self.beliefs.failure_cost_s

    def _belief(self, relay: str) -> _Belief:
        if relay not in self._of:
            start = self.beliefs
            self._of[relay] = _Belief(math.log(start.rate_bytes_per_s), start.rate_spread**2, 0.0, start.rtt_s)
        return self._of[relay]


POLICIES: dict[str, Callable[[], RelayChoice]] = {
    "published": lambda: MovingAverage(failures="published"),
    "moving-average": MovingAverage,
    "expected-finish": ExpectedFinish,
}


def best_rate(policy: RelayChoice, relays: Sequence[str], now_s: float, unknown_bytes_per_s: float = 20e6) -> float:
    """Bytes per second that the best relay is expected to deliver, by the policy's estimate."""
    size = 1 << 20
    seconds = min(policy.expected_s(relay, now_s, size) for relay in relays)
    return size / seconds if 0 < seconds < math.inf else unknown_bytes_per_s
