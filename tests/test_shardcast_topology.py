"""The relays' tree, and what one client may take."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.shardcast.limits import Serving, ServingLimits
from refimpl.shardcast.topology import (
    ENDLESS,
    MEMORY_S,
    NOWHERE,
    LinkRates,
    Place,
    Position,
    Rank,
    TreeRules,
    choose_parent,
    position_below,
)

Links = dict[str, dict[str, float]]


def origin(epoch: int = 1) -> Position:
    return Position("origin", (), ENDLESS, Rank(epoch, 0), 1 << 20)


def relay(name: str, *path: str, rate: float, epoch: int = 1, free_slots: int = 1) -> Position:
    return Position(name, path, rate, Rank(epoch, len(path)), free_slots)


def test_the_narrowest_link_on_the_way_counts() -> None:
    near, far = relay("near", "origin", rate=10.0), relay("far", "near", "origin", rate=8.0)
    positions = {"origin": origin(), "near": near, "far": far}
    link = {"origin": 3.0, "near": 6.0, "far": 9.0}
    place = choose_parent("me", Place("origin"), positions, link, TreeRules(gain=1.25))
    assert place == Place("far", Rank(1, 3))  # min(8, 9) beats min(10, 6) and 3
    assert position_below("me", far, 9.0, place.rank, 2) == Position(
        "me", ("far", "near", "origin"), 8.0, Rank(1, 3), 2
    )


def test_it_moves_only_for_a_clear_gain() -> None:
    positions = {"a": relay("a", "origin", rate=10.0), "b": relay("b", "origin", rate=12.0)}
    link, place = {"a": 100.0, "b": 100.0}, Place("a", Rank(1, 2))
    assert choose_parent("me", place, positions, link, TreeRules(gain=1.25)).parent == "a"
    assert choose_parent("me", place, positions, link, TreeRules(gain=1.1)).parent == "b"


def test_a_child_is_no_parent_and_a_loop_does_not_last() -> None:
    """After a restart ranks are forgotten: then the path decides."""
    below = {"child": relay("child", "me", "origin", rate=50.0), "origin": origin()}
    assert choose_parent("me", Place("origin"), below, {"child": 99.0, "origin": 1.0}).parent == "origin"
    loop = {"other": relay("other", "me", "other", rate=50.0), "origin": origin()}
    assert choose_parent("me", Place("other"), loop, {"other": 99.0, "origin": 1.0}).parent == "origin"


def test_full_unmeasured_and_unconnected_relays_are_not_chosen() -> None:
    positions = {
        "origin": origin(),
        "full": relay("full", "origin", rate=50.0, free_slots=0),
        "unmeasured": relay("unmeasured", "origin", rate=50.0),
        "lost": relay("lost", rate=50.0, epoch=-1),
        "deep": relay("deep", *(f"r{i}" for i in range(9)), "origin", rate=50.0),
    }
    link = {"full": 9.0, "lost": 9.0, "deep": 9.0, "origin": 1.0}
    assert choose_parent("me", Place("origin"), positions, link).parent == "origin"
    assert choose_parent("me", Place("full"), positions, link).parent == "full"  # its own child may stay
    assert choose_parent("me", Place("dead", Rank(4, 2)), {}, {}) == Place("dead", Rank(4, 2))


def test_a_dead_parent_is_replaced_by_whoever_stands_higher() -> None:
    positions = {"beside": relay("beside", "origin", rate=50.0, epoch=3), "origin": origin(3)}
    link = {"beside": 9.0, "origin": 1.0}
    assert choose_parent("me", Place("dead", Rank(3, 2)), positions, link) == Place("beside", Rank(3, 2))
    # one that stands no higher must first have word of a newer epoch; the origin always stands higher
    assert choose_parent("me", Place("dead", Rank(3, 1)), positions, link) == Place("origin", Rank(3, 1))
    positions["beside"] = relay("beside", "origin", rate=50.0, epoch=4)
    assert choose_parent("me", Place("dead", Rank(3, 1)), positions, link) == Place("beside", Rank(4, 2))


# One step of the property below: who moves; for each other node, how old its news is and the measured rate (None: it
# does not answer); and whether the origin begins a new epoch.
STEP = st.tuples(
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(1, 1000)), min_size=6, max_size=6),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEP, max_size=60))
def test_no_sequence_of_measurements_makes_a_loop(
    steps: list[tuple[int, list[tuple[int, int | None]], bool]],
) -> None:
    """Whatever is measured, whoever moves when, and however old the news is on which it moves."""
    names = [f"r{i}" for i in range(5)]
    places = {name: Place("origin") for name in names}
    epoch, said = 1, {name: [Position(name, (), 0.0, NOWHERE, 9)] for name in names}
    said["origin"] = [origin(epoch)]
    for who, news, rises in steps:
        if rises:
            epoch += 1
            said["origin"].append(origin(epoch))
        me = names[who]
        heard = {
            name: (said[name][max(0, len(said[name]) - 1 - age)], rate)
            for name, (age, rate) in zip([*names, "origin"], news, strict=True)
            if rate is not None and name != me
        }
        positions = {name: position for name, (position, _) in heard.items()}
        links = {name: float(rate) for name, (_, rate) in heard.items()}
        before = places[me].rank
        places[me] = choose_parent(me, places[me], positions, links, TreeRules(gain=1.0))
        assert places[me].rank == before or places[me].rank.above(before)
        parent = places[me].parent
        if parent in positions:
            said[me].append(position_below(me, positions[parent], links[parent], places[me].rank, 9))
        for name in names:
            node, steps_up = name, 0
            while node != "origin":
                node, steps_up = places[node].parent, steps_up + 1
                assert steps_up <= len(names), f"the tree has a loop: {places}"


def widest(links: Links) -> dict[str, float]:
    """For each relay the largest rate that any way from the origin allows (Dijkstra on the bottleneck)."""
    best, heap = {"origin": float("inf")}, [(-float("inf"), "origin")]
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
    places = {name: Place("origin") for name in names}
    positions = {me: position_below(me, origin(0), links[me]["origin"], NOWHERE, 99) for me in names}
    rules = TreeRules(gain=1.0001, depth_max=12)
    for turn in range(200):
        news = {**positions, "origin": origin(turn // 5)}
        for me in rng.permutation(names).tolist():
            seen = news if at_once else {**positions, "origin": origin(turn // 5)}
            if at_once and rng.random() < 0.3:
                continue  # clocks differ
            others = {name: position for name, position in seen.items() if name != me}
            places[me] = choose_parent(me, places[me], others, links[me], rules)
            parent = places[me].parent
            positions[me] = position_below(me, seen[parent], links[me][parent], places[me].rank, 99)
    best = widest(links)
    for me in names:
        node, steps = me, 0
        while node != "origin":
            node, steps = places[node].parent, steps + 1
            assert steps <= len(names), "the tree has a loop"
        assert positions[me].rate_bytes_per_s == pytest.approx(best[me], rel=0.01)


def test_a_probe_counts_without_its_round_trip_and_the_parent_has_the_benefit_of_doubt() -> None:
    links = LinkRates()
    links.answered("p", 0.1)
    for duration_s in (9.0, 0.6, 0.35, 0.5):
        links.probed("p", 1_000_000, duration_s, 1.0)
    assert links.rate("p", 1.0, parent="p") == pytest.approx(4e6)  # of the last three: 2, 4, 2.5
    assert links.rate("p", 1.0, parent="q") == pytest.approx(2e6)
    assert links.rate("never asked", 3.0, parent="p") is None
    assert links.rates(1.0, parent="p") == {"p": pytest.approx(4e6)}


def test_who_answers_probes_and_delivers_nothing_is_held_to_that() -> None:
    links = LinkRates()
    links.probed("p", 1_000_000, 0.1, 0.0)
    links.came("p", 1e6, 10.0, 10.0)
    for now_s, rate in ((10.0, 1e5), (10.0 + MEMORY_S - 1, 1e5), (10.0 + MEMORY_S, 1e7)):
        assert links.rate("p", now_s, parent="q") == pytest.approx(rate)
    links.came("p", 1e6, 10.0, 200.0)
    assert links.rate("p", 200.0 + 2 * MEMORY_S - 1, parent="p") == pytest.approx(1e5)  # longer the second time
    links.probed("q", 1_000_000, 1.0, 0.0)
    links.came("q", 5e6, 1.0, 1.0)
    assert links.rate("q", 1.0, parent="q") == pytest.approx(5e6)  # ten transfers beside the probe fill the line
    links.quiet("q")
    assert links.rate("q", 1.0, parent="q") == pytest.approx(1e6)


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


def test_who_makes_up_names_shares_what_its_address_may_take() -> None:
    limits = ServingLimits(bytes_per_s=100.0, burst_bytes=1000.0, transfers_per_client=2, clients_per_address=2.0)
    serving = Serving(limits)
    assert [serving.take(f"name {i}", 1000, 0.0, "10.0.0.1") for i in range(3)] == [0.0, 0.0, 5.0]
    assert [serving.open(f"name {i}", 0.0, "10.0.0.1") for i in range(4)] == [None] * 4
    assert "open to your address" in str(serving.open("name 5", 0.0, "10.0.0.1"))
    assert serving.take("polite", 1000, 0.0, "10.0.0.2") == 0.0 and serving.open("polite", 0.0, "10.0.0.2") is None
    for i in range(4):
        serving.close(f"name {i}", 0.0, "10.0.0.1")
    serving.close("polite", 0.0, "10.0.0.2")
    serving.forget_idle(100.0)
    assert serving.accounts == 0


def test_idle_clients_are_forgotten_but_not_their_debts() -> None:
    serving = Serving(ServingLimits(bytes_per_s=100.0, burst_bytes=1000.0))
    for client in ("a", "b"):
        assert serving.open(client, 0.0) is None
    serving.take("b", 900, 0.0)
    for client in ("a", "b"):
        serving.close(client, 0.0)
    assert serving.accounts == 1
    serving.forget_idle(5.0)
    assert serving.accounts == 1
    serving.forget_idle(9.0)
    assert serving.accounts == 0


def test_a_slow_reader_is_cut_off() -> None:
    """H10: one slow client blocked all."""
    serving = Serving(ServingLimits(drip_bytes_per_s=100.0, drip_s=10.0))
    assert not serving.drips(0, 9.9) and serving.drips(999, 10.0) and not serving.drips(1000, 10.0)
