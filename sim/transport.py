"""Why: a link carries more than payload, and TCP rarely fills it alone; what a transfer gets follows from stated rules.

A `Transport` turns a path (capacities, latency, loss) into what the flow engine needs: a bound on the rate, a weight,
and the delay before or after the flow. `FAIR` shares links evenly. `LV08` is the TCP model of SimGrid (Velho and
Legrand, SIMUTools 2009), with its constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

ETHERNET_TCP_EFFICIENCY = 1448 / 1514
"""Payload of a full TCP segment (time stamps on) over the Ethernet frame that carries it: 100 Mbit/s carry 95.6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """How transfers behave on top of fair sharing. The defaults add nothing."""

    payload_efficiency: float = 1.0  # share of a link's bytes that is payload: headers, and what TCP leaves unused
    window_bytes: float = inf  # rate <= window / round trip
    loss_bound: bool = True  # rate <= MSS / round trip * C / sqrt(loss)  (Mathis et al., CCR 1997)
    mss_bytes: int = 1448  # payload of one segment
    mathis_constant: float = sqrt(3 / 2)  # C: every segment acknowledged; sqrt(3/4) with delayed acknowledgements
    round_trip_s_min: float = 1e-4  # a path is never shorter than this in the two bounds above
    retransmission_timeout_s: float = 0.2  # Linux's least; at least the round trip plus this passes before a resend
    latency_factor: float = 1.0  # of the one-way latency: what slow start costs, in LV08
    latency_first: bool = False  # the flow takes its links only after the latency, as in SimGrid
    weight_bytes: float | None = None  # share ~ 1 / (latency + sum of weight_bytes / capacity); None: all alike

    def __post_init__(self) -> None:
        for name in ("payload_efficiency", "window_bytes", "mss_bytes", "mathis_constant", "round_trip_s_min"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} of the transport is {value}; expected above 0")
        if self.payload_efficiency > 1:
            raise ValueError(f"payload_efficiency of the transport is {self.payload_efficiency}; expected at most 1")
        for name in ("retransmission_timeout_s", "latency_factor"):
            value = getattr(self, name)
            if not 0 <= value < inf:
                raise ValueError(f"{name} of the transport is {value}; expected a finite number, 0 or more")
        if self.weight_bytes is not None and not 0 <= self.weight_bytes < inf:
            raise ValueError(f"weight_bytes of the transport is {self.weight_bytes}; expected 0 or more, or None")

    def rate_bound_bytes_per_s(self, round_trip_s: float, loss: float) -> float:
        """What one connection may reach on an otherwise empty path, in payload bytes/s."""
        round_trip_s = max(round_trip_s, self.round_trip_s_min)
        bound = self.payload_efficiency * self.window_bytes / round_trip_s
        if self.loss_bound and loss > 0:
            bound = min(bound, self.mss_bytes / round_trip_s * self.mathis_constant / sqrt(loss))
        return bound

    def weight(self, one_way_latency_s: float, capacities_bytes_per_s: Sequence[float]) -> float:
        """How large a share of a full link the path takes."""
        if self.weight_bytes is None:
            return 1.0
        slowness_s = one_way_latency_s + sum(self.weight_bytes / capacity for capacity in capacities_bytes_per_s)
        return 1.0 / slowness_s if slowness_s > 0 else 1.0

    def retransmission_s(self, round_trip_s: float, lost_in_a_row: int) -> float:
        """The wait until the last segment is through, when it was lost so many times: the time-out doubles each time.

        sum over i < k of RTO * 2**i = RTO * (2**k - 1)
        """
        return (round_trip_s + self.retransmission_timeout_s) * (2.0 ** min(lost_in_a_row, 10) - 1.0)


FAIR = Transport()
TCP = Transport(payload_efficiency=ETHERNET_TCP_EFFICIENCY, window_bytes=4_194_304)
LV08 = Transport(
    payload_efficiency=0.97,
    window_bytes=4_194_304,
    loss_bound=False,
    latency_factor=13.01,
    latency_first=True,
    weight_bytes=20_537,
    round_trip_s_min=1e-9,
)
