"""Why: when one transfer of thousands begins or ends, few rates move; this compiled core finds exactly those.

Weighted max-min fairness. Every link l has a *level* S_l (bytes/s per unit of weight) at which it is full, or infinity
when it is not full. A flow f is held by exactly one full link b(f), the one of smallest level on its path, and gets

    rate_f = w_f * S_b(f),      S_l = the x that solves  sum over f on l of  w_f * min(x, level of f elsewhere) = C_l.

A change is repaired in the order of rising levels, as Dijkstra's algorithm settles nodes in the order of distance:

* A link whose flows or capacity changed is *pending*; so becomes a link that shares a flow whose rate moves.
* A pending link waits in a queue under the lower of its old level and the level that its flows now allow. Flows held
  by another pending link count as free to grow, so that this is never too high; if it is too low, a second look when
  its turn comes puts it back.
* Popped at its old level while it could go higher, it is *released*: the links that its flows also cross are pending.
* Popped at the level that its flows allow, it is settled: it takes every flow on it that is not held lower. If its
  level did not move, nothing spreads. A settled link is never opened again, so each is scanned only a few times.
* A link that is not full gives each of its flows a *limit* on its level, and keeps the rest as spare: the sum of
  w_f * limit_f and the spare is C_l. A flow that joins, or may rise above its limit, takes from the spare; only when
  that is used up need the link be looked at, since until then it cannot fill.

Finishing times cost nothing while a link's flows stay the same: all flows held by a link progress by the link's level,
so each is filed once in the link's heap under the service (bytes per weight, V_l = integral of S_l dt) at which it
ends, and a level that moves changes one number per link instead of one per flow.

Everything lives in flat arrays, rows named below; link 0 stands for "held by no link yet". No SimPy, no torch. One file
on purpose: numba's cache on disk notices a change only in the file of the function that it compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# rows of link_f
SHARE, LEVEL, CAPACITY, SERVICE, SERVICE_S, ALLOWED, WEIGHTS, SPARE, EVENT_KEY, QUEUE_KEY = range(10)
# SHARE: S_l. LEVEL: the same, but infinity while pending (= does not limit others yet). SERVICE: V_l at time SERVICE_S.
# ALLOWED: the level that its flows allow, as last scanned. WEIGHTS: sum of weights of all flows on the link.
# SPARE: bytes/s that no flow's limit lays claim to, while the link is not full.
# rows of link_i
START, COUNT, ROOM, HELD, STATUS, SCANNED, QUEUE_AT, EVENT_AT, DIRTY, EVENTS, QUEUE, TOUCHED, CHANGED = range(13)
# START, COUNT, ROOM: its piece of the member pool. HELD: so many members, the first ones, are held by it (a heap).
# SCANNED: the EPOCH in which ALLOWED was computed. EVENTS, QUEUE, TOUCHED, CHANGED are not per link but lists of links,
# the first two heaps by EVENT_KEY and QUEUE_KEY; EVENT_AT and QUEUE_AT: a link's place in them, or -1.
# rows of member_i and member_f
FLOW, PLACE, HOLDER = range(3)  # slot of the flow, which of the flow's links this is, link that holds the flow
WEIGHT, KEY, LIMIT = range(3)
# KEY: service at which the flow ends, for members that this link holds. LIMIT: level up to which the flow may rise
# without a look at this link, while the link is not full.
# columns of flow_i: number of links, holder, DONE, then `width` links, then `width` positions in those links' members
LINKS, HELD_BY, DONE, FIRST = 0, 1, 2, 3  # DONE: a list of the slots that finished
# columns of flow_f
FLOW_WEIGHT, FLOW_LEFT, DONE_S = 0, 1, 2  # FLOW_LEFT: bytes per weight, until the flow is first held
# counters
POOL_TOP, EVENT_COUNT, QUEUE_COUNT, TOUCHED_COUNT, CHANGED_COUNT, SOLVES, SCANS, MOVED, EPOCH = range(9)
# EPOCH rises whenever a link becomes pending or settled: what was computed before may have changed.
# values of STATUS
CLEAN, PENDING, RELEASED, SETTLED = range(4)

SAME = 1e-14  # levels this close (relative) are the same: rounding must not spread
FULL = 1e-12  # a link loaded within this of its capacity needs no level of its own
MARGIN = 1e-9  # of the capacity: spare that is never given away, to cover rounding in its bookkeeping
ULPS = 4  # finishes within so many roundings of the clock are one event


class Core(NamedTuple):
    """The whole state, as arrays that numba can take; `grown` replaces them by larger ones."""

    link_f: np.ndarray  # float64 [10, links]
    link_i: np.ndarray  # int64 [13, links]
    flow_f: np.ndarray  # float64 [flows, 3]
    flow_i: np.ndarray  # int64 [flows, 3 + 2 * width]
    member_f: np.ndarray  # float64 [3, pool]
    member_i: np.ndarray  # int64 [3, pool]
    counters: np.ndarray  # int64 [9]


def new_core(links: int = 64, flows: int = 64, width: int = 4, pool: int = 1024) -> Core:
    core = Core(
        link_f=np.zeros((10, links)),
        link_i=np.zeros((13, links), np.int64),
        flow_f=np.zeros((flows, 3)),
        flow_i=np.zeros((flows, FIRST + 2 * width), np.int64),
        member_f=np.zeros((3, pool)),
        member_i=np.zeros((3, pool), np.int64),
        counters=np.zeros(9, np.int64),
    )
    core.link_f[SHARE, :] = core.link_f[LEVEL, :] = np.inf
    core.link_i[QUEUE_AT, :] = core.link_i[EVENT_AT, :] = -1
    return core


def grown(core: Core, links: int, flows: int, width: int, pool: int) -> Core:
    """A core of at least these sizes with the same content (members are packed anew)."""
    old_width = (core.flow_i.shape[1] - FIRST) // 2
    larger = new_core(
        max(links, core.link_f.shape[1]),
        max(flows, core.flow_f.shape[0]),
        max(width, old_width),
        max(pool, core.member_f.shape[1]),
    )
    link_count, flow_count = core.link_f.shape[1], core.flow_f.shape[0]
    larger.link_f[:, :link_count] = core.link_f
    larger.link_i[:, :link_count] = core.link_i
    larger.flow_f[:flow_count] = core.flow_f
    new_width = (larger.flow_i.shape[1] - FIRST) // 2
    larger.flow_i[:flow_count, : FIRST + old_width] = core.flow_i[:, : FIRST + old_width]
    larger.flow_i[:flow_count, FIRST + new_width : FIRST + new_width + old_width] = core.flow_i[:, FIRST + old_width :]
    larger.counters[:] = core.counters
    _pack_members(core.link_i, core.member_f, core.member_i, larger.link_i, larger.member_f, larger.member_i)
    used = larger.link_i[ROOM].sum()
    larger.counters[POOL_TOP] = used
    return larger


@njit(cache=True)
def _pack_members(old_i, old_member_f, old_member_i, link_i, member_f, member_i):  # type: ignore[no-untyped-def]
    top = 0
    for link in range(old_i.shape[1]):
        start, count = old_i[START, link], old_i[COUNT, link]
        for row in range(3):
            for i in range(count):
                member_f[row, top + i] = old_member_f[row, start + i]
                member_i[row, top + i] = old_member_i[row, start + i]
        link_i[START, link] = top
        link_i[ROOM, link] = count
        top += count


# -------------------------------------------------------- binary heaps of links (EVENTS by time, QUEUE by level)


@njit(cache=True, inline="always")
def _before(keys, links, a, b):  # type: ignore[no-untyped-def]
    return keys[a] < keys[b] or (keys[a] == keys[b] and links[a] < links[b])


@njit(cache=True)
def _sift(keys, links, places, at, count):  # type: ignore[no-untyped-def]
    """Move entry `at` up or down to where it belongs."""
    key, link = keys[at], links[at]
    while at > 0:
        up = (at - 1) >> 1
        if key < keys[up] or (key == keys[up] and link < links[up]):
            keys[at], links[at] = keys[up], links[up]
            places[links[at]] = at
            at = up
        else:
            break
    while True:
        down = 2 * at + 1
        if down >= count:
            break
        if down + 1 < count and _before(keys, links, down + 1, down):
            down += 1
        if keys[down] < key or (keys[down] == key and links[down] < link):
            keys[at], links[at] = keys[down], links[down]
            places[links[at]] = at
            at = down
        else:
            break
    keys[at], links[at] = key, link
    places[link] = at


@njit(cache=True)
def _heap_set(core, which, key_row, place_row, counter, link, key):  # type: ignore[no-untyped-def]
    """Insert the link, or move it to its new key."""
    keys, links, places = core.link_f[key_row], core.link_i[which], core.link_i[place_row]
    at = places[link]
    if at < 0:
        at = core.counters[counter]
        core.counters[counter] += 1
        links[at] = link
    keys[at] = key
    _sift(keys, links, places, at, core.counters[counter])


@njit(cache=True)
def _heap_remove(core, which, key_row, place_row, counter, link):  # type: ignore[no-untyped-def]
    keys, links, places = core.link_f[key_row], core.link_i[which], core.link_i[place_row]
    at = places[link]
    if at < 0:
        return
    places[link] = -1
    last = core.counters[counter] - 1
    core.counters[counter] = last
    if at != last:
        keys[at], links[at] = keys[last], links[last]
        _sift(keys, links, places, at, last)


# ---------------------------------------------------------------- members: who is on a link, and whom the link holds


@njit(cache=True, inline="always")
def _note_place(core, width, p, start):  # type: ignore[no-untyped-def]
    core.flow_i[core.member_i[FLOW, p], FIRST + width + core.member_i[PLACE, p]] = p - start


@njit(cache=True)
def _swap_members(core, width, start, p, q):  # type: ignore[no-untyped-def]
    if p == q:
        return
    for row in range(3):
        core.member_i[row, p], core.member_i[row, q] = core.member_i[row, q], core.member_i[row, p]
    for row in range(3):
        core.member_f[row, p], core.member_f[row, q] = core.member_f[row, q], core.member_f[row, p]
    _note_place(core, width, p, start)
    _note_place(core, width, q, start)


@njit(cache=True)
def _member_sift(core, width, start, at, count):  # type: ignore[no-untyped-def]
    """Restore the heap of held members (by KEY, then flow) around entry `at`."""
    keys, flows = core.member_f[KEY], core.member_i[FLOW]
    while at > 0:
        up = (at - 1) >> 1
        p, q = start + at, start + up
        if keys[p] < keys[q] or (keys[p] == keys[q] and flows[p] < flows[q]):
            _swap_members(core, width, start, p, q)
            at = up
        else:
            break
    while True:
        down = 2 * at + 1
        if down >= count:
            break
        q = start + down
        if down + 1 < count and (keys[q + 1] < keys[q] or (keys[q + 1] == keys[q] and flows[q + 1] < flows[q])):
            down += 1
            q += 1
        p = start + at
        if keys[q] < keys[p] or (keys[q] == keys[p] and flows[q] < flows[p]):
            _swap_members(core, width, start, p, q)
            at = down
        else:
            break


@njit(cache=True)
def _set_holder(core, width, flow, holder):  # type: ignore[no-untyped-def]
    core.flow_i[flow, HELD_BY] = holder
    for j in range(core.flow_i[flow, LINKS]):
        link = core.flow_i[flow, FIRST + j]
        core.member_i[HOLDER, core.link_i[START, link] + core.flow_i[flow, FIRST + width + j]] = holder


@njit(cache=True, inline="always")
def _place_on(core, width, flow, link):  # type: ignore[no-untyped-def]
    for j in range(core.flow_i[flow, LINKS]):
        if core.flow_i[flow, FIRST + j] == link:
            return core.flow_i[flow, FIRST + width + j]
    return -1


@njit(cache=True, inline="always")
def _service(core, link, now_s):  # type: ignore[no-untyped-def]
    """V_l(now) = V_l + S_l * (now - t), while the link holds somebody."""
    return core.link_f[SERVICE, link] + core.link_f[SHARE, link] * (now_s - core.link_f[SERVICE_S, link])


@njit(cache=True)
def _hold(core, width, flow, link, left, now_s):  # type: ignore[no-untyped-def]
    """Link takes hold of a flow that still has `left` bytes per weight to go."""
    link_i = core.link_i
    start, held = link_i[START, link], link_i[HELD, link]
    if held == 0:
        core.link_f[SERVICE, link] = 0.0
        core.link_f[SERVICE_S, link] = now_s
    _set_holder(core, width, flow, link)
    p = start + _place_on(core, width, flow, link)
    _swap_members(core, width, start, p, start + held)
    core.member_f[KEY, start + held] = core.link_f[SERVICE, link] + left
    link_i[HELD, link] = held + 1
    _member_sift(core, width, start, held, held + 1)


@njit(cache=True)
def _let_go(core, width, flow, link, now_s):  # type: ignore[no-untyped-def]
    """Link lets go of a flow; returns the bytes per weight it still has to go."""
    link_i = core.link_i
    start, last = link_i[START, link], link_i[HELD, link] - 1
    at = _place_on(core, width, flow, link)
    left = core.member_f[KEY, start + at] - _service(core, link, now_s)
    link_i[HELD, link] = last
    if at != last:
        _swap_members(core, width, start, start + at, start + last)
        _member_sift(core, width, start, at, last)
    return max(left, 0.0)


@njit(cache=True, inline="always")
def _note_change(core, link):  # type: ignore[no-untyped-def]
    if core.link_i[DIRTY, link] == 0:
        core.link_i[DIRTY, link] = 1
        core.link_i[CHANGED, core.counters[CHANGED_COUNT]] = link
        core.counters[CHANGED_COUNT] += 1


@njit(cache=True, inline="always")
def _claim(core, link, p, limit, target):  # type: ignore[no-untyped-def]
    """Raise the limit of member p of a link that is not full from `limit` to `target`, if there is enough to spare."""
    capacity = core.link_f[CAPACITY, link]
    if core.link_i[COUNT, link] == 1:
        core.link_f[SPARE, link] = capacity
        limit = 0.0
    claim = core.member_f[WEIGHT, p] * (target - limit)
    if not core.link_f[SPARE, link] - claim > MARGIN * capacity:
        return False
    core.link_f[SPARE, link] -= claim
    core.member_f[LIMIT, p] = target
    return True


@njit(cache=True)
def _highest_level(core, flow):  # type: ignore[no-untyped-def]
    """No level can lift the flow above its narrowest link: min over its links of C_l / w_f."""
    highest = np.inf
    for j in range(core.flow_i[flow, LINKS]):
        highest = min(highest, core.link_f[CAPACITY, core.flow_i[flow, FIRST + j]])
    return highest / core.flow_f[flow, FLOW_WEIGHT]


@njit(cache=True)
def attach(core, flow, path, count, weight, size_bytes):  # type: ignore[no-untyped-def]
    """Put a flow on its links, held by none yet. False, with nothing changed, when the member pool is too small."""
    width = (core.flow_i.shape[1] - FIRST) // 2
    link_i, counters = core.link_i, core.counters
    need = 0
    for j in range(count):
        if link_i[COUNT, path[j]] == link_i[ROOM, path[j]]:
            need += max(4, 2 * link_i[ROOM, path[j]])
    if counters[POOL_TOP] + need > core.member_f.shape[1]:
        return False
    core.flow_f[flow, FLOW_WEIGHT] = weight
    core.flow_f[flow, FLOW_LEFT] = size_bytes / weight
    core.flow_i[flow, LINKS] = count
    core.flow_i[flow, HELD_BY] = 0
    highest = np.inf
    for j in range(count):
        highest = min(highest, core.link_f[CAPACITY, path[j]] / weight)
    for j in range(count):
        link = path[j]
        start, members, room = link_i[START, link], link_i[COUNT, link], link_i[ROOM, link]
        if members == room:  # move to a piece twice as large; the old piece is waste until the pool is packed
            new_start, room = counters[POOL_TOP], max(4, 2 * room)
            for row in range(3):
                for i in range(members):
                    core.member_i[row, new_start + i] = core.member_i[row, start + i]
                    core.member_f[row, new_start + i] = core.member_f[row, start + i]
            counters[POOL_TOP] += room
            link_i[START, link] = start = new_start
            link_i[ROOM, link] = room
        p = start + members
        core.member_i[FLOW, p] = flow
        core.member_i[PLACE, p] = j
        core.member_i[HOLDER, p] = 0
        core.member_f[WEIGHT, p] = weight
        core.member_f[LIMIT, p] = 0.0
        core.flow_i[flow, FIRST + j] = link
        core.flow_i[flow, FIRST + width + j] = members
        link_i[COUNT, link] = members + 1
        core.link_f[WEIGHTS, link] += weight
        if core.link_f[SHARE, link] != np.inf or link_i[DIRTY, link] == 1 or not _claim(core, link, p, 0.0, highest):
            _note_change(core, link)
    return True


@njit(cache=True)
def detach(core, flow, now_s):  # type: ignore[no-untyped-def]
    """Take a flow off its links; returns the bytes it still had to go."""
    width = (core.flow_i.shape[1] - FIRST) // 2
    link_i, weight, holder = core.link_i, core.flow_f[flow, FLOW_WEIGHT], core.flow_i[flow, HELD_BY]
    left = core.flow_f[flow, FLOW_LEFT] if holder == 0 else _let_go(core, width, flow, holder, now_s)
    for j in range(core.flow_i[flow, LINKS]):
        link = core.flow_i[flow, FIRST + j]
        start, last = link_i[START, link], link_i[COUNT, link] - 1
        _swap_members(core, width, start, start + core.flow_i[flow, FIRST + width + j], start + last)
        link_i[COUNT, link] = last
        core.link_f[WEIGHTS, link] = 0.0 if last == 0 else core.link_f[WEIGHTS, link] - weight
        core.link_f[SPARE, link] += weight * core.member_f[LIMIT, start + last]
        if core.link_f[SHARE, link] != np.inf:  # a link that was not full is no fuller now
            _note_change(core, link)
    return left * weight


@njit(cache=True)
def change_capacity(core, link, capacity):  # type: ignore[no-untyped-def]
    core.link_f[CAPACITY, link] = capacity
    _note_change(core, link)
    start = core.link_i[START, link]
    for p in range(start, start + core.link_i[COUNT, link]):
        if core.member_i[HOLDER, p] == 0:  # joined in this instant, with limits for the old capacity
            flow = core.member_i[FLOW, p]
            for j in range(core.flow_i[flow, LINKS]):
                _note_change(core, core.flow_i[flow, FIRST + j])


# ---------------------------------------------------------------- the repair


@njit(cache=True)
def _allowed_level(core, link):  # type: ignore[no-untyped-def]
    """The x that solves sum of w_f * min(x, level of f elsewhere) = C, by Newton's method on a concave, piecewise
    linear function: after the first step x only rises, and ends after finitely many. Infinity: the link is not full."""
    link_f = core.link_f
    start, count, held = core.link_i[START, link], core.link_i[COUNT, link], core.link_i[HELD, link]
    capacity = link_f[CAPACITY, link]
    weights, holders, levels = core.member_f[WEIGHT], core.member_i[HOLDER], link_f[LEVEL]
    core.counters[SCANS] += 1
    own = 0.0
    for p in range(start, start + held):
        own += weights[p]
    x = link_f[SHARE, link]
    if x == np.inf:
        x = capacity / max(link_f[WEIGHTS, link], 1e-300)
    first = True
    while True:
        frozen, free, highest_frozen, lowest_free = 0.0, own, 0.0, np.inf
        for p in range(start + held, start + count):
            level = levels[holders[p]]
            if level <= x:
                frozen += weights[p] * level
                highest_frozen = max(highest_frozen, level)
            else:
                free += weights[p]
                lowest_free = min(lowest_free, level)
        if free == 0.0:
            if not first or frozen <= capacity * (1.0 + FULL):
                return np.inf
            total = 0.0
            for p in range(start, start + count):
                total += weights[p]
            x_next = capacity / total
        else:
            x_next = max(capacity - frozen, 0.0) / free
            if highest_frozen <= x_next <= lowest_free or (not first and x_next <= x):
                return x_next
        x = x_next
        first = False


@njit(cache=True)
def _mark(core, link, level):  # type: ignore[no-untyped-def]
    """Something about the link's flows changed at `level`, and what they allow may have fallen to it."""
    link_i = core.link_i
    status = link_i[STATUS, link]
    if status == SETTLED:
        return
    if status == CLEAN:
        link_i[STATUS, link] = PENDING
        link_i[SCANNED, link] = -1
        core.counters[EPOCH] += 1
        core.link_f[LEVEL, link] = np.inf
        core.link_i[TOUCHED, core.counters[TOUCHED_COUNT]] = link
        core.counters[TOUCHED_COUNT] += 1
        _heap_set(core, QUEUE, QUEUE_KEY, QUEUE_AT, QUEUE_COUNT, link, level)
    elif core.link_f[QUEUE_KEY, link_i[QUEUE_AT, link]] > level:
        _heap_set(core, QUEUE, QUEUE_KEY, QUEUE_AT, QUEUE_COUNT, link, level)


@njit(cache=True)
def _release(core, link, level, allowed, everyone):  # type: ignore[no-untyped-def]
    """The link's flows may rise from `level` up to `allowed`: the links that they also cross are pending. Links that
    are not full only where a flow could rise above its limit; only those unless `everyone`."""
    link_f, link_i, start = core.link_f, core.link_i, core.link_i[START, link]
    width = (core.flow_i.shape[1] - FIRST) // 2
    for p in range(start, start + link_i[HELD, link]):
        flow = core.member_i[FLOW, p]
        for j in range(core.flow_i[flow, LINKS]):
            other = core.flow_i[flow, FIRST + j]
            if other == link or link_i[STATUS, other] == SETTLED:
                continue
            if link_i[STATUS, other] == CLEAN and link_f[SHARE, other] == np.inf:
                q = link_i[START, other] + core.flow_i[flow, FIRST + width + j]
                limit = core.member_f[LIMIT, q]
                if allowed > limit:
                    target = max(limit, min(allowed, _highest_level(core, flow)))
                    if not _claim(core, other, q, limit, target):
                        _mark(core, other, level)
            elif everyone:
                _mark(core, other, level)


@njit(cache=True)
def _share_out_spare(core, link):  # type: ignore[no-untyped-def]
    """Half of C_l - load goes to the flows by weight, half is kept: limit_f = level_f + (C_l - load) / 2 / sum of w."""
    start, count, load, total = core.link_i[START, link], core.link_i[COUNT, link], 0.0, 0.0
    for p in range(start, start + count):
        load += core.member_f[WEIGHT, p] * core.link_f[SHARE, core.member_i[HOLDER, p]]
        total += core.member_f[WEIGHT, p]
    spare = max(core.link_f[CAPACITY, link] - load, 0.0) / 2
    core.link_f[SPARE, link] = spare
    for p in range(start, start + count):
        core.member_f[LIMIT, p] = core.link_f[SHARE, core.member_i[HOLDER, p]] + spare / total


@njit(cache=True)
def _settle(core, width, link, level, now_s):  # type: ignore[no-untyped-def]
    """Fix the link's level; take hold of every flow on it that nothing holds lower; tell the links they also cross."""
    link_f, link_i, flow_i = core.link_f, core.link_i, core.flow_i
    before = link_f[SHARE, link]
    if level != np.inf and before != np.inf and abs(level - before) <= SAME * before:
        level = before
    start, held, count = link_i[START, link], link_i[HELD, link], link_i[COUNT, link]
    link_i[STATUS, link] = SETTLED
    core.counters[EPOCH] += 1
    if held > 0:
        link_f[SERVICE, link] = _service(core, link, now_s)
    link_f[SERVICE_S, link] = now_s
    link_f[SHARE, link] = link_f[LEVEL, link] = level
    if level == np.inf:
        _share_out_spare(core, link)
        return
    if level != before:
        core.counters[MOVED] += 1
        for p in range(start, start + held):
            flow = core.member_i[FLOW, p]
            for j in range(flow_i[flow, LINKS]):
                other = flow_i[flow, FIRST + j]
                if other != link and link_i[STATUS, other] == CLEAN and link_f[SHARE, other] != np.inf:
                    _mark(core, other, level)
    i = held
    while i < count:
        flow, holder = core.member_i[FLOW, start + i], core.member_i[HOLDER, start + i]
        if link_f[LEVEL, holder] > level * (1.0 + SAME):
            if holder == 0:
                left = core.flow_f[flow, FLOW_LEFT]
            else:
                left = _let_go(core, width, flow, holder, now_s)
            _hold(core, width, flow, link, left, now_s)  # swaps the flow with member `held`, which was looked at before
            for j in range(flow_i[flow, LINKS]):
                other = flow_i[flow, FIRST + j]
                if other != link and link_i[STATUS, other] == CLEAN and link_f[SHARE, other] != np.inf:
                    _mark(core, other, level)
        i += 1


@njit(cache=True)
def solve(core, now_s):  # type: ignore[no-untyped-def]
    """Repair all levels after the changes noted so far, which all happened at `now_s`. Returns the next finish."""
    link_f, link_i, counters = core.link_f, core.link_i, core.counters
    width = (core.flow_i.shape[1] - FIRST) // 2
    for i in range(counters[CHANGED_COUNT]):
        link = core.link_i[CHANGED, i]
        link_i[DIRTY, link] = 0
        _mark(core, link, 0.0)
    counters[CHANGED_COUNT] = 0
    counters[SOLVES] += 1
    while counters[QUEUE_COUNT] > 0:
        link, level = core.link_i[QUEUE, 0], core.link_f[QUEUE_KEY, 0]
        before = link_f[SHARE, link]
        if link_i[SCANNED, link] != counters[EPOCH]:
            link_i[SCANNED, link] = counters[EPOCH]
            allowed, old_allowed = _allowed_level(core, link), link_f[ALLOWED, link]
            link_f[ALLOWED, link] = allowed
            if link_i[STATUS, link] == RELEASED and allowed > old_allowed:
                _release(core, link, level, allowed, False)
        allowed = link_f[ALLOWED, link]
        key = min(before, allowed) if link_i[STATUS, link] == PENDING else allowed
        if key > level:
            _heap_set(core, QUEUE, QUEUE_KEY, QUEUE_AT, QUEUE_COUNT, link, key)
            continue
        if link_i[STATUS, link] == PENDING and before * (1.0 + SAME) < allowed:
            link_i[STATUS, link] = RELEASED
            link_i[SCANNED, link] = -1
            _release(core, link, level, allowed, True)
            continue
        _heap_remove(core, QUEUE, QUEUE_KEY, QUEUE_AT, QUEUE_COUNT, link)
        _settle(core, width, link, allowed, now_s)
    for i in range(counters[TOUCHED_COUNT]):
        link = core.link_i[TOUCHED, i]
        link_i[STATUS, link] = CLEAN
        link_f[LEVEL, link] = link_f[SHARE, link]
        _file_next_finish(core, link)
    counters[TOUCHED_COUNT] = 0
    return core.link_f[EVENT_KEY, 0] if counters[EVENT_COUNT] > 0 else np.inf


@njit(cache=True)
def _file_next_finish(core, link):  # type: ignore[no-untyped-def]
    """t_l = t + (V of the first to end - V_l) / S_l."""
    share = core.link_f[SHARE, link]
    if core.link_i[HELD, link] == 0 or share == 0.0:
        _heap_remove(core, EVENTS, EVENT_KEY, EVENT_AT, EVENT_COUNT, link)
        return
    to_go = core.member_f[KEY, core.link_i[START, link]] - core.link_f[SERVICE, link]
    _heap_set(
        core, EVENTS, EVENT_KEY, EVENT_AT, EVENT_COUNT, link, core.link_f[SERVICE_S, link] + max(to_go, 0.0) / share
    )


@njit(cache=True)
def run_until(core, limit_s):  # type: ignore[no-untyped-def]
    """Finish, in order, every flow that ends by `limit_s`, and solve after each instant. Returns (how many finished,
    next finish); slots are in column DONE of flow_i, times in DONE_S of flow_f."""
    count = 0
    while core.counters[EVENT_COUNT] > 0 and core.link_f[EVENT_KEY, 0] <= limit_s:
        now_s = core.link_f[EVENT_KEY, 0]
        same_s = now_s + ULPS * 2.3e-16 * abs(now_s)
        while core.counters[EVENT_COUNT] > 0 and core.link_f[EVENT_KEY, 0] <= same_s:
            link = core.link_i[EVENTS, 0]
            flow = core.member_i[FLOW, core.link_i[START, link]]
            detach(core, flow, now_s)
            core.flow_i[count, DONE] = flow
            core.flow_f[count, DONE_S] = now_s
            count += 1
            _file_next_finish(core, link)
        solve(core, now_s)
    return count, (core.link_f[EVENT_KEY, 0] if core.counters[EVENT_COUNT] > 0 else np.inf)


@njit(cache=True)
def load_on(core, link):  # type: ignore[no-untyped-def]
    """Sum of the rates of all flows on the link."""
    load, start = 0.0, core.link_i[START, link]
    for p in range(start, start + core.link_i[COUNT, link]):
        load += core.member_f[WEIGHT, p] * core.link_f[SHARE, core.member_i[HOLDER, p]]
    return load
