"""From the capped tables to a cycle: the search over bottlenecks, and over orders where no exact table is small enough.

With S(T) the least latency of a ring whose bottleneck is at most T, the least of C = max(M * T, S(T)) lies where the
rising M * T meets the falling S(T): a binary search over the values that T can take, two tables at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from refimpl.pipeline.partition_dp import Capped, Cut, Tables, best_in_order, capped

Solver = Callable[[Capped], Cut | None]

SEARCH_WORK_MAX = 4_000_000_000
"""Inner steps of the local search, about 5 s of one core at most; reached only by chains of dozens of stages."""


def cycle_s(tables: Tables, cut: Cut, weight: float) -> float:
    """C = max(M * bottleneck, latency) for M = `weight`; the bottleneck itself for a saturated ring (infinite M)."""
    bottleneck_s, latency_s = tables.figures(cut)
    return bottleneck_s if math.isinf(weight) else max(weight * bottleneck_s, latency_s)


def _better(tables: Tables, weight: float, a: Cut | None, b: Cut | None) -> Cut | None:
    """The cut of the smaller cycle; of equal cycles, that of the smaller latency."""
    if a is None or b is None:
        return b if a is None else a
    keys = [(cycle_s(tables, cut, weight), tables.figures(cut)[1]) for cut in (a, b)]
    return a if keys[0] <= keys[1] else b


def best_cycle(tables: Tables, weight: float, solve: Solver) -> Cut | None:
    """The cut of least cycle, and among these of least latency, by the given exact table."""
    if weight == 1.0:
        return solve(capped(tables, math.inf))
    caps_s = tables.caps_s()
    loosest = solve(capped(tables, float(caps_s[-1])))
    if loosest is None:
        return None
    low, high, best = 0, len(caps_s) - 1, loosest
    while low < high:  # the first cap T at which a cut exists with S(T) <= M * T
        middle = (low + high) // 2
        cut = solve(capped(tables, float(caps_s[middle])))
        best = _better(tables, weight, best, cut) or best
        meets = cut is not None and (math.isinf(weight) or tables.figures(cut)[1] <= weight * caps_s[middle])
        low, high = (low, middle) if meets else (middle + 1, high)
    best = _better(tables, weight, best, solve(capped(tables, float(caps_s[high])))) or best
    if high > 0:
        best = _better(tables, weight, best, solve(capped(tables, float(caps_s[high - 1])))) or best
    # among cuts of this cycle the loosest cap that keeps it has the least latency
    cycle = cycle_s(tables, best, weight)
    keep = int(np.searchsorted(caps_s * (1.0 if math.isinf(weight) else weight), cycle, side="right")) - 1
    return _better(tables, weight, solve(capped(tables, float(caps_s[keep]))), best) if keep >= 0 else best


def best_of_orders(tables: Tables, weight: float, rng: np.random.Generator) -> Cut | None:
    """A good cut over any order: several whole orders, each cut exactly, then a local search on the best chain."""
    best: Cut | None = None
    problem: Capped | None = None
    for order in _orders(tables, rng):
        if problem is None:
            best = best_cycle(tables, weight, partial(best_in_order, order=order))
        else:
            best = _better(tables, weight, best, best_in_order(problem, order))
        if best is not None:
            problem = _under(tables, weight, cycle_s(tables, best, weight))
    return None if best is None else _local_search(tables, weight, best)


def _under(tables: Tables, weight: float, below_s: float) -> Capped:
    """The stages and links of cuts whose cycle is under `below_s`."""
    return capped(tables, float(np.nextafter(below_s if math.isinf(weight) else below_s / weight, 0.0)))


def _orders(tables: Tables, rng: np.random.Generator) -> list[np.ndarray]:
    """Whole orders to start from: by speed, by memory, by both, near neighbours from three starts, two at random."""
    count = len(tables.room_bytes)
    time_s, room = tables.time_prefix_s[:, -1], tables.room_bytes
    mean_s = np.where(np.isfinite(tables.latency_s), tables.latency_s, np.nan)
    orders = [np.argsort(time_s, kind="stable"), np.argsort(-room, kind="stable")]
    orders.append(np.argsort(time_s / np.maximum(room, 1.0), kind="stable"))
    starts = np.argsort(np.where(np.isnan(mean_s), np.inf, mean_s).sum(axis=1) + time_s, kind="stable")[:3]
    orders.extend(_near_neighbours(tables, int(start)) for start in starts)
    orders.extend(rng.permutation(count) for _ in range(2))
    return orders


def _near_neighbours(tables: Tables, start: int) -> np.ndarray:
    """From device to device, always to the one of least hop plus time per layer."""
    ways_s = tables.latency_s + tables.transfer_s + (tables.time_prefix_s[:, -1] / tables.layers)[None, :]
    order, left = [start], set(range(len(tables.room_bytes))) - {start}
    while left:
        here = order[-1]
        step = min(sorted(left), key=lambda d: ways_s[here, d])
        order.append(step)
        left.remove(step)
    return np.array(order)


def _local_search(tables: Tables, weight: float, cut: Cut) -> Cut:
    """Moves on the chain of used devices until none helps, or until `SEARCH_WORK_MAX`: swap two, move one, reverse a
    part, exchange one for an unused one, insert an unused one. Each move is judged by one exact table over the moved
    chain, begun on its first device."""
    work, better = 0, True
    while better:
        best_s, better = cycle_s(tables, cut, weight), False
        problem = _under(tables, weight, best_s)
        for chain in _moves([d for d, _, _ in cut], len(tables.room_bytes)):
            work += len(chain) ** 2 * tables.layers
            if work > SEARCH_WORK_MAX:
                return cut
            moved = best_in_order(problem, np.array(chain), firsts=1)
            if moved is not None and cycle_s(tables, moved, weight) < best_s:
                cut, best_s, better = moved, cycle_s(tables, moved, weight), True
                problem = _under(tables, weight, best_s)
    return cut


def _moves(chain: list[int], count: int) -> list[list[int]]:
    """The neighbours of a chain over devices 0 .. count - 1."""
    unused = sorted(set(range(count)) - set(chain))
    size = len(chain)
    moves = []
    for a in range(size):
        for b in range(size):
            if a < b:
                swapped = list(chain)
                swapped[a], swapped[b] = swapped[b], swapped[a]
                moves.append(swapped)
                moves.append(chain[:a] + chain[a : b + 1][::-1] + chain[b + 1 :])
            if a != b:
                rest = chain[:a] + chain[a + 1 :]
                moves.append([*rest[:b], chain[a], *rest[b:]])
        moves.extend([*chain[:a], d, *chain[a + 1 :]] for d in unused)
    moves.extend([*chain[:a], d, *chain[a:]] for d in unused for a in range(size + 1))
    return moves


def reach(tables: Tables, free: bool) -> Cut:
    """How far memory alone lets the devices hold the chain, as stages: for the explanation.

    Each device in turn takes as many layers as fit; in free order those with the most room come first.
    """
    order = np.argsort(-tables.room_bytes, kind="stable") if free else np.arange(len(tables.room_bytes))
    at, filled = 0, []
    for d in (int(d) for d in order):
        ends = [end for end in range(at + 1, tables.layers + 1) if tables.fits(d, at, end)]
        if ends:
            filled.append((d, at, ends[-1]))
            at = ends[-1]
    return filled
