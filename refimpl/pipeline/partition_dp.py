"""The two exact tables behind `partition`: least latency of a ring whose stages and links each take at most `cap_s`.

Capping the bottleneck and minimising the sum is all that either objective needs (`partition_search.best_cycle`).

Both tables hold, per device d and number of layers i, the least sum over stages that cover layers 0 .. i - 1 and end on
d. A stage costs a difference of prefix sums, so the least over its first layer j is a sliding-window minimum of
`arrive[j] - prefix[d, j]`, with the window's lower edge set by memory and by the cap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numba import njit

Cut = list[tuple[int, int, int]]
"""Stages in ring order: (device, first layer, end layer)."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A partition problem as arrays. D devices, L layers."""

    time_prefix_s: np.ndarray  # [D, L + 1]
    bytes_prefix: np.ndarray  # [L + 1]
    ends_s: np.ndarray  # [D, 2]: embedding, head
    ends_bytes: np.ndarray  # [3]: embedding, head, both on one stage
    room_bytes: np.ndarray  # [D]
    latency_s: np.ndarray  # [D, D]
    transfer_s: np.ndarray  # [D, D]

    @property
    def layers(self) -> int:
        return len(self.bytes_prefix) - 1

    def stage_s(self, device: int, first: int, end: int) -> float:
        """tau of a stage, computed as the tables compute it."""
        ends_s = self.ends_s[device]
        extra = (ends_s[0] if first == 0 else 0.0) + (ends_s[1] if end == self.layers else 0.0)
        return float(self.time_prefix_s[device, end] - self.time_prefix_s[device, first] + extra)

    def fits(self, device: int, first: int, end: int) -> bool:
        """Does the device's memory hold layers first .. end - 1?"""
        is_last = end == self.layers
        extra = self.ends_bytes[2 if is_last else 0] if first == 0 else (self.ends_bytes[1] if is_last else 0.0)
        return bool(self.bytes_prefix[end] - self.bytes_prefix[first] + extra <= self.room_bytes[device])

    def figures(self, cut: Cut) -> tuple[float, float]:
        """(bottleneck_s, latency_s) of a cut; the hop that closes the ring carries token ids, so only its latency."""
        bottleneck_s = max(self.stage_s(*stage) for stage in cut)
        latency_s = sum(self.stage_s(*stage) for stage in cut)
        for (source, _, _), (target, _, _) in pairwise(cut):
            bottleneck_s = max(bottleneck_s, float(self.transfer_s[source, target]))
            latency_s += float(self.latency_s[source, target] + self.transfer_s[source, target])
        if len(cut) > 1:
            latency_s += float(self.latency_s[cut[-1][0], cut[0][0]])
        return bottleneck_s, latency_s

    def without_links(self) -> Tables:
        """The same problem with links that cost nothing: what memory alone allows."""
        return replace(self, latency_s=np.zeros_like(self.latency_s), transfer_s=np.zeros_like(self.transfer_s))

    def caps_s(self) -> np.ndarray:
        """Every value that the bottleneck of a cut can take, ascending: stage times and link occupations."""
        prefix, layers = self.time_prefix_s, self.layers
        values = [self.transfer_s[np.isfinite(self.transfer_s)].ravel()]
        for first in range(layers):
            inner = prefix[:, first + 1 :] - prefix[:, [first]]
            extra = np.zeros_like(inner)
            if first == 0:
                extra += self.ends_s[:, [0]]
            extra[:, -1] += self.ends_s[:, 1]
            values.append((inner + extra).ravel())
        return np.unique(np.concatenate(values))


@dataclass(frozen=True, kw_only=True)
class Capped:
    """The stages and links that a cap on the bottleneck leaves, per device: shared by every order of the devices."""

    prefix_s: np.ndarray  # [D, L + 1]
    ends_s: np.ndarray  # [D, 2]
    lowest: np.ndarray  # [D, L + 1]: least first layer >= 1 of a stage that ends at i; i: there is none
    whole: np.ndarray  # [D, L + 1]: may the device hold layers 0 .. i - 1?
    ways_s: np.ndarray  # [D, D]: infinite where the link is missing or busier than the cap allows
    back_s: np.ndarray  # [D, D]: the hop that closes the ring


def capped(tables: Tables, cap_s: float) -> Capped:
    """What is left of the problem when no stage and no link may take longer than `cap_s`."""
    lowest, whole = _windows(tables, cap_s)
    return Capped(
        prefix_s=tables.time_prefix_s,
        ends_s=tables.ends_s,
        lowest=lowest,
        whole=whole,
        ways_s=np.where(tables.transfer_s <= cap_s, tables.latency_s + tables.transfer_s, np.inf),
        back_s=tables.latency_s,
    )


def best_in_order(problem: Capped, order: np.ndarray | None = None, firsts: int | None = None) -> Cut | None:
    """The cut of least latency whose devices follow `order` (some may be left out); None: there is none.

    `firsts`: only the first so many of the order may begin the chain (all, when None).
    """
    if order is None:
        order = np.arange(len(problem.prefix_s))
    p = problem
    args = (order, p.prefix_s, p.ends_s, p.lowest, p.whole, p.ways_s)
    total_s, first, last = _best_ends(len(order) if firsts is None else firsts, *args, p.back_s)
    if not np.isfinite(total_s):
        return None
    cost_s = _order_table(first, *args)
    cut: Cut = []
    at, end = last, p.prefix_s.shape[1] - 1
    while at != first:
        d = order[at]
        befores_s, ways_s = cost_s[first:at], p.ways_s[order[first:at], d]
        e, begin = _step(end, cost_s[at, end], befores_s, ways_s, p.prefix_s[d], p.ends_s[d, 1], p.lowest[d])
        assert e >= 0, "a finite cell has a predecessor"
        cut.append((int(d), int(begin), end))
        at, end = int(e) + first, int(begin)
    cut.append((int(order[first]), 0, end))
    return cut[::-1]


def kinds_of(tables: Tables) -> list[list[int]]:
    """Devices grouped so that swapping two of one group changes nothing: equal room, times and links."""
    same = (tables.time_prefix_s, tables.ends_s, tables.room_bytes)
    groups: list[list[int]] = []
    for d in range(len(tables.room_bytes)):
        for group in groups:
            e = group[0]
            others = np.ones(len(tables.room_bytes), dtype=bool)
            others[[d, e]] = False
            if all(np.array_equal(array[d], array[e]) for array in same) and all(
                np.array_equal(m[d, others], m[e, others])
                and np.array_equal(m[others, d], m[others, e])
                and m[d, e] == m[e, d]
                for m in (tables.latency_s, tables.transfer_s)
            ):
                group.append(d)
                break
        else:
            groups.append([d])
    return groups


def kinds_work(tables: Tables, kinds: list[list[int]]) -> float:
    """Inner steps that one `best_of_kinds` costs."""
    states = float(np.prod([min(len(kind), tables.layers) + 1.0 for kind in kinds]))
    return states * len(kinds) ** 3 * tables.layers


def best_of_kinds(problem: Capped, kinds: list[list[int]]) -> Cut | None:
    """The cut of least latency over any subset of the devices in any order; None: there is none."""
    heads = np.array([kind[0] for kind in kinds])
    mates = np.array([kind[1] if len(kind) > 1 else kind[0] for kind in kinds])
    between_s, back_s = problem.ways_s[np.ix_(heads, heads)], problem.back_s[np.ix_(heads, heads)]
    for k, (a, b) in enumerate(zip(heads, mates, strict=True)):
        between_s[k, k], back_s[k, k] = problem.ways_s[a, b], problem.back_s[b, a]
    layers = problem.prefix_s.shape[1] - 1
    counts = np.array([min(len(kind), layers) for kind in kinds], dtype=np.int64)
    strides = np.concatenate([[1], np.cumprod(counts[:-1] + 1)]).astype(np.int64)
    prefix_s, ends_s = problem.prefix_s[heads], problem.ends_s[heads]
    lowest, whole = problem.lowest[heads], problem.whole[heads]
    best_s, best = np.inf, None
    for f in range(len(kinds)):
        cost_s = _kinds_table(f, counts, strides, prefix_s, ends_s, lowest, whole, between_s)
        total_s, state, k = _close_ring(f, strides, cost_s, back_s)
        if total_s < best_s:
            best_s = total_s
            best = _kinds_path(f, state, k, cost_s, counts, strides, prefix_s, ends_s, lowest, whole, between_s)
    if best is None:
        return None
    taken = [0] * len(kinds)
    cut: Cut = []
    for k, first, end in best:
        cut.append((kinds[k][taken[k]], first, end))
        taken[k] += 1
    return cut


def _windows(tables: Tables, cap_s: float) -> tuple[np.ndarray, np.ndarray]:
    """`Capped.lowest` and `Capped.whole`: which stages memory and the cap leave to each device."""
    devices, layers = tables.time_prefix_s.shape[0], tables.layers
    lowest = np.tile(np.arange(layers + 1), (devices, 1))
    whole = np.zeros((devices, layers + 1), dtype=np.bool_)
    need_bytes = tables.bytes_prefix[None, :] - tables.bytes_prefix[:, None]  # [j, i]
    last = np.zeros(layers + 1)
    last[-1] = 1.0
    whole_bytes = need_bytes[0] + np.where(last > 0, tables.ends_bytes[2], tables.ends_bytes[0])
    inner = np.triu(np.ones((layers + 1, layers + 1), dtype=bool), k=1)
    inner[0] = False
    for d in range(devices):
        prefix_s, room_bytes = tables.time_prefix_s[d], tables.room_bytes[d]
        embedding_s, head_s = tables.ends_s[d]
        stage_s = prefix_s[None, :] - prefix_s[:, None] + last * head_s
        ok = inner & (need_bytes + last * tables.ends_bytes[1] <= room_bytes) & (stage_s <= cap_s)
        any_ok = ok.any(axis=0)
        lowest[d, any_ok] = ok.argmax(axis=0)[any_ok]
        whole[d] = (whole_bytes <= room_bytes) & (prefix_s - prefix_s[0] + (embedding_s + last * head_s) <= cap_s)
    whole[:, 0] = False
    return lowest, whole


@njit(cache=True)
def _extend(
    arrive_s: np.ndarray, prefix_s: np.ndarray, head_s: float, lowest: np.ndarray, out_s: np.ndarray, queue: np.ndarray
) -> None:
    """out[i] = min(out[i], min of arrive[j] + prefix[i] - prefix[j] (+ head for i = L) over lowest[i] <= j < i)."""
    layers = out_s.shape[0] - 1
    front, back = 0, 0
    for i in range(2, layers + 1):
        value = arrive_s[i - 1] - prefix_s[i - 1]
        while back > front and arrive_s[queue[back - 1]] - prefix_s[queue[back - 1]] >= value:
            back -= 1
        queue[back] = i - 1
        back += 1
        while back > front and queue[front] < lowest[i]:
            front += 1
        if back > front:
            total = arrive_s[queue[front]] - prefix_s[queue[front]] + prefix_s[i]
            if i == layers:
                total += head_s
            if total < out_s[i]:
                out_s[i] = total


@njit(cache=True)
def _start(prefix_s: np.ndarray, ends_s: np.ndarray, whole: np.ndarray, out_s: np.ndarray) -> None:
    """Stages that begin at layer 0."""
    layers = out_s.shape[0] - 1
    for i in range(1, layers + 1):
        if whole[i]:
            out_s[i] = prefix_s[i] - prefix_s[0] + ends_s[0] + (ends_s[1] if i == layers else 0.0)


@njit(cache=True)
def _arrive(cost_s: np.ndarray, way_s: float, arrive_s: np.ndarray) -> None:
    """arrive[j] = min(arrive[j], cost[j] + way): layers 0 .. j - 1 done by one predecessor, and its hop."""
    if np.isfinite(way_s):
        for j in range(1, cost_s.shape[0]):
            total = cost_s[j] + way_s
            if total < arrive_s[j]:
                arrive_s[j] = total


@njit(cache=True)
def _order_table(
    first: int,
    order: np.ndarray,
    prefix_s: np.ndarray,
    ends_s: np.ndarray,
    lowest: np.ndarray,
    whole: np.ndarray,
    ways_s: np.ndarray,
) -> np.ndarray:
    """[len(order), L + 1] least sums of chains that begin on device `order[first]` and follow the order."""
    points = prefix_s.shape[1]
    cost_s = np.full((len(order), points), np.inf)
    arrive_s, queue = np.empty(points), np.empty(points, dtype=np.int64)
    _start(prefix_s[order[first]], ends_s[order[first]], whole[order[first]], cost_s[first])
    for at in range(first + 1, len(order)):
        d = order[at]
        arrive_s[:] = np.inf
        for e in range(first, at):
            _arrive(cost_s[e], ways_s[order[e], d], arrive_s)
        _extend(arrive_s, prefix_s[d], ends_s[d, 1], lowest[d], cost_s[at], queue)
    return cost_s


@njit(cache=True)
def _best_ends(
    firsts: int,
    order: np.ndarray,
    prefix_s: np.ndarray,
    ends_s: np.ndarray,
    lowest: np.ndarray,
    whole: np.ndarray,
    ways_s: np.ndarray,
    back_s: np.ndarray,
) -> tuple[float, int, int]:
    """(least latency of a closed ring, its first place in the order, its last)."""
    best, first, last = np.inf, -1, -1
    for f in range(firsts):
        if not whole[order[f]].any():
            continue
        cost_s = _order_table(f, order, prefix_s, ends_s, lowest, whole, ways_s)
        for at in range(f, len(order)):
            total = cost_s[at, -1]
            if at != f:
                total += back_s[order[at], order[f]]
            if total < best:
                best, first, last = total, f, at
    return best, first, last


@njit(cache=True)
def _step(
    end: int,
    cost_s: float,
    befores_s: np.ndarray,
    ways_s: np.ndarray,
    prefix_s: np.ndarray,
    head_s: float,
    lowest: np.ndarray,
) -> tuple[int, int]:
    """Which (predecessor, first layer) gave this cost: the least of them, found again."""
    best, before, first = np.inf, -1, 0
    for j in range(lowest[end], end):
        for e in range(befores_s.shape[0]):
            if np.isfinite(ways_s[e]) and np.isfinite(befores_s[e, j]):
                total = befores_s[e, j] + ways_s[e] - prefix_s[j] + prefix_s[end]
                if end == prefix_s.shape[0] - 1:
                    total += head_s
                if total < best:
                    best, before, first = total, e, j
    if best <= cost_s:
        return before, first
    return -1, 0


@njit(cache=True)
def _kinds_table(
    first: int,
    counts: np.ndarray,
    strides: np.ndarray,
    prefix_s: np.ndarray,
    ends_s: np.ndarray,
    lowest: np.ndarray,
    whole: np.ndarray,
    between_s: np.ndarray,
) -> np.ndarray:
    """[states, kinds, L + 1]: a state says how many devices of each kind are used; the last one is of kind k."""
    kinds, points = prefix_s.shape
    states = 1
    for k in range(kinds):
        states *= counts[k] + 1
    cost_s = np.full((states, kinds, points), np.inf)
    arrive_s, queue = np.empty(points), np.empty(points, dtype=np.int64)
    for state in range(1, states):
        if (state // strides[first]) % (counts[first] + 1) == 0:
            continue
        for k in range(kinds):
            if (state // strides[k]) % (counts[k] + 1) == 0:
                continue
            before = state - strides[k]
            if before == 0:
                _start(prefix_s[k], ends_s[k], whole[k], cost_s[state, k])
            else:
                arrive_s[:] = np.inf
                for e in range(kinds):
                    _arrive(cost_s[before, e], between_s[e, k], arrive_s)
                _extend(arrive_s, prefix_s[k], ends_s[k, 1], lowest[k], cost_s[state, k], queue)
    return cost_s


@njit(cache=True)
def _close_ring(first: int, strides: np.ndarray, cost_s: np.ndarray, back_s: np.ndarray) -> tuple[float, int, int]:
    """The cheapest whole chain and its way back to the first stage (no way back for a chain of one)."""
    best, at, kind = np.inf, -1, -1
    for state in range(cost_s.shape[0]):
        for k in range(cost_s.shape[1]):
            total = cost_s[state, k, -1]
            if np.isfinite(total):
                if not (k == first and state == strides[first]):
                    total += back_s[k, first]
                if total < best:
                    best, at, kind = total, state, k
    return best, at, kind


def _kinds_path(
    first: int,
    state: int,
    kind: int,
    cost_s: np.ndarray,
    counts: np.ndarray,
    strides: np.ndarray,
    prefix_s: np.ndarray,
    ends_s: np.ndarray,
    lowest: np.ndarray,
    whole: np.ndarray,
    between_s: np.ndarray,
) -> Cut:
    """The chain behind one cell of the table, with kinds in place of devices."""
    cut: Cut = []
    end, k = prefix_s.shape[1] - 1, kind
    while state != strides[first] or k != first:
        before = state - int(strides[k])
        e, begin = _step(
            end, cost_s[state, k, end], cost_s[before], between_s[:, k], prefix_s[k], ends_s[k, 1], lowest[k]
        )
        assert e >= 0, "a finite cell has a predecessor"
        cut.append((k, int(begin), end))
        state, k, end = before, int(e), int(begin)
    cut.append((k, 0, end))
    return cut[::-1]
