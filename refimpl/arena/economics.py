"""Does cheating pay? What an attack saves against what it risks.

An honest answer costs 1. The attack saves a share s of it. Of all answers a share a is audited, and an audit finds this
attack with probability d; then the pay w for the answer is lost, and the stake K with it. Per answer the attack gains

    profit(a) = s - a · d · (K + w),      break-even at a* = s / (d · (K + w)).

Audits above a* make the attack a loss. Where d = 0, or a* > 1, no audit rate does.

Costs are a roofline's: time = max(2 · weights · tokens / FLOP/s, bytes read / bandwidth) of each pass, attention's own
products left out. They are what a real implementation of the attack would cost on the reference device, since a
simulated 4-bit model saves nothing here (`attacks.engines.Priced`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from refimpl.work import Forward, Several, Work


@dataclass(frozen=True, kw_only=True)
class Device:
    """A reference device. Data-sheet figures; dense bf16."""

    name: str
    flop_per_s: float
    bytes_per_s: float


REFERENCE = Device(name="RTX 4090", flop_per_s=165e12, bytes_per_s=1008e9)


def seconds(work: Work, device: Device = REFERENCE) -> float:
    """What `work` takes; passes through the model only (hashing and proving are below a hundredth of them)."""
    if isinstance(work, Several):
        return sum(seconds(part, device) for part in work.parts)
    if not isinstance(work, Forward):
        return 0.0
    model = work.model
    products = 2 * model.weights_active * work.batch * work.new_tokens
    past = work.past_tokens + work.steps / 2
    read = model.weight_bytes + work.batch * past * model.kv_bytes_per_token
    return work.steps * max(products / device.flop_per_s, read / device.bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Stakes:
    """What is at risk, in costs of one honest answer."""

    pay: float = 1.2
    stake: float = 100.0

    def profit(self, saved: float, detection: float, audit: float) -> float:
        """Per answer, beyond an honest one's."""
        return saved - audit * detection * (self.stake + self.pay)

    def break_even(self, saved: float, detection: float) -> float:
        """The audit rate above which the attack loses; 0 if it saves nothing, inf if no rate does."""
        if saved <= 0:
            return 0.0
        rate = saved / (detection * (self.stake + self.pay)) if detection > 0 else math.inf
        return rate if rate <= 1 else math.inf


AUDITS = np.geomspace(1e-4, 1.0, 60)
