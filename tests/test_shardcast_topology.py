"""The relays' tree, and what one client may take."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from refimpl.shardcast.limits import Serving, ServingLimits
from refimpl.shardcast.topology import ORIGIN_POSITION, Position, TreeRules, choose_parent, position_below

Links = dict[str, dict[str, float]]


def test_the_narrowest_link_on_the_way_counts() -> None:
    positions = {"near": Position(("origin",), 10.0), "far": Position(("near", "origin"), 8.0)}
    link = {"origin": 3.0, "near": 6.0, "far": 9.0}
    assert choose_parent("me", "origin", None, positions, link) == "far"  # min(8, 9) beats min(10, 6) and 3
    assert position_below("far", positions["far"], 9.0, 2) == Position(("far", "near", "origin"), 8.0, 2)


def test_it_moves_only_for_a_clear_gain() -> None:
    positions = {"a": Position(("origin",), 10.0), "b": Position(("origin",), 12.0)}
    link = {"a": 100.0, "b": 100.0}
    assert choose_parent("me", "origin", "a", positions, link, TreeRules(gain=1.25)) == "a"
    assert choose_parent("me", "origin", "a", positions, link, TreeRules(gain=1.1)) == "b"


def test_a_child_is_no_parent_and_a_loop_does_not_last() -> None:
    below = {"child": Position(("me", "origin"), 50.0)}
    assert choose_parent("me", "origin", None, below, {"child": 99.0, "origin": 1.0}) == "origin"
    loop = {"other": Position(("me", "other"), 50.0)}  # both moved at once
    assert choose_parent("me", "origin", "other", loop, {"other": 99.0, "origin": 1.0}) == "origin"


def test_full_unmeasured_and_unconnected_relays_are_not_chosen() -> None:
    positions = {
        "full": Position(("origin",), 50.0, free_slots=0),
        "unmeasured": Position(("origin",), 50.0),
        "lost": Position((), 50.0),
        "deep": Position((*(f"r{i}" for i in range(9)), "origin"), 50.0),
    }
    link = {"full": 9.0, "lost": 9.0, "deep": 9.0, "origin": 1.0}
    assert choose_parent("me", "origin", None, positions, link) == "origin"
    assert choose_parent("me", "origin", "full", positions, link) == "full"  # its own child may stay
    assert choose_parent("me", "origin", "dead", {}, {}) == "origin"


def widest(links: Links, origin: str) -> dict[str, float]:
    """For each relay the largest rate that any way from the origin allows (Dijkstra on the bottleneck)."""
    best, heap = {origin: float("inf")}, [(-float("inf"), origin)]
    while heap:
        rate, node = heapq.heappop(heap)
        for relay in links:
            wide = min(-rate, links[relay].get(node, 0.0))
            if wide > best.get(relay, 0.0):
                best[relay] = wide
                heapq.heappush(heap, (-wide, relay))
    return best


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at_once", [False, True])
def test_relays_that_each_follow_the_rule_find_the_widest_tree(seed: int, at_once: bool) -> None:
    """Also when all move in the same instant, on the news of the instant before."""
    rng = np.random.default_rng(seed)
    names = [f"r{i}" for i in range(12)]
    links: Links = {me: {p: float(rng.lognormal(3, 1)) for p in ["origin", *names] if p != me} for me in names}
    parent = dict.fromkeys(names, "origin")
    positions = {me: position_below("origin", ORIGIN_POSITION, links[me]["origin"], 99) for me in names}
    rules = TreeRules(gain=1.0001, depth_max=12)
    for _ in range(60):
        news = dict(positions)
        for me in rng.permutation(names).tolist():
            seen = news if at_once else positions
            if at_once and rng.random() < 0.3:
                continue  # clocks differ
            others = {name: position for name, position in seen.items() if name != me}
            parent[me] = choose_parent(me, "origin", parent[me], others, links[me], rules)
            above = ORIGIN_POSITION if parent[me] == "origin" else seen[parent[me]]
            positions[me] = position_below(parent[me], above, links[me][parent[me]], 99)
    best = widest(links, "origin")
    for me in names:
        node, steps = me, 0
        while node != "origin":
            node, steps = parent[node], steps + 1
            assert steps <= len(names), "the tree has a loop"
        assert positions[me].rate_bytes_per_s == pytest.approx(best[me], rel=0.01)


# -------------------------------------------------------------------------------------------------------------- limits
def test_a_client_that_floods_waits_and_the_others_do_not() -> None:
    serving = Serving(ServingLimits(bytes_per_s=100.0, burst_bytes=1000.0))
    assert serving.take("flood", 1000, 0.0) == 0.0
    assert serving.take("flood", 500, 0.0) == 5.0
    assert serving.take("polite", 1000, 0.0) == 0.0
    assert serving.take("flood", 100, 4.0) == pytest.approx(2.0)  # 500 owed, 400 earned, 100 more: 200 at 100 a second


def test_transfers_at_once_are_limited_per_client_and_in_all() -> None:
    serving = Serving(ServingLimits(transfers_per_client=2, transfers=3))
    assert [serving.open("a", 0.0) for _ in range(2)] == [None, None]
    assert "open to you" in str(serving.open("a", 0.0))
    assert serving.open("b", 0.0) is None and "in use" in str(serving.open("c", 0.0))
    serving.close("a", 1.0)
    assert serving.open("c", 1.0) is None


def test_idle_clients_are_forgotten_but_not_their_debts() -> None:
    serving = Serving(ServingLimits(bytes_per_s=100.0, burst_bytes=1000.0))
    for client in ("a", "b"):
        assert serving.open(client, 0.0) is None
    serving.take("b", 900, 0.0)
    for client in ("a", "b"):
        serving.close(client, 0.0)
    assert serving.clients == 1
    serving.forget_idle(5.0)
    assert serving.clients == 1
    serving.forget_idle(9.0)
    assert serving.clients == 0


def test_a_slow_reader_is_cut_off() -> None:
    """H10: one slow client blocked all."""
    serving = Serving(ServingLimits(drip_bytes_per_s=100.0, drip_s=10.0))
    assert not serving.drips(0, 9.9) and serving.drips(999, 10.0) and not serving.drips(1000, 10.0)
