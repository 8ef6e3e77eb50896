"""Why: who asks how far a transfer is, or what holds it up, must not disturb it; this reads the flow solver's arrays.

Nothing is changed: neither the clock nor any flow. Shape suffix F: one entry per flow asked for.
"""

from __future__ import annotations

import numpy as np

from sim.flows_core import FIRST, FLOW_WEIGHT, HELD_BY, KEY, SERVICE, SERVICE_S, SHARE, START, Core


def held_at(core: Core, slots: list[int], at_s: float) -> tuple[list[float], list[int]]:
    """Bytes that the flows in these slots have left at `at_s`, and the links that hold them; all must be solved."""
    if not slots:
        return [], []
    slot_F = np.array(slots, np.int64)
    width = (core.flow_i.shape[1] - FIRST) // 2
    holder_F = core.flow_i[slot_F, HELD_BY]
    which_F = np.argmax(core.flow_i[slot_F, FIRST : FIRST + width] == holder_F[:, None], axis=1)
    member_F = core.link_i[START, holder_F] + core.flow_i[slot_F, FIRST + width + which_F]
    since_F = at_s - core.link_f[SERVICE_S, holder_F]
    service_F = (
        core.link_f[SERVICE, holder_F] + core.link_f[SHARE, holder_F] * since_F
    )  # V_l(t) = V_l + S_l * (t - t_l)
    left_F = (core.member_f[KEY, member_F] - service_F) * core.flow_f[slot_F, FLOW_WEIGHT]
    return np.maximum(left_F, 0.0).tolist(), holder_F.tolist()
