"""Which relay, which shard, when again: the published rule by hand, and the better one against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.shardcast.choice import Beliefs, ExpectedFinish, MovingAverage, RelayChoice
from refimpl.shardcast.fetch import Fetch, FetchPlan, FetchRules, Wait

MB = 1_000_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def averages(**bandwidth_mb_s: float) -> MovingAverage:
    policy = MovingAverage()
    for relay, bandwidth in bandwidth_mb_s.items():
        policy.observe(relay, int(bandwidth * MB), 1.0, True)
    return policy


# --------------------------------------------------------------------------------------------- the original's rule
def test_the_first_sample_sets_both_averages() -> None:
    assert averages(a=10, b=4).estimate("a") == (10.0, 1.0)
    assert averages(a=10, b=6).shares(["a", "b"]) == [0.625, 0.375]


def test_ema_and_healing_by_hand() -> None:
    """F-19: EMA 0.3, heal +0.01 per update to all, weights q·b."""
    policy = averages(a=10, b=4)
    policy.observe("a", 20 * MB, 1.0, True)
    assert policy.estimate("a") == pytest.approx((0.3 * 20 + 0.7 * 10, 1.0))  # 13; q capped at 1
    policy.observe("b", 0, 30.0, False)
    assert policy.estimate("b") == pytest.approx((0.7 * 4, 0.7 * 1.0 + 0.01))  # 2.8, 0.71
    policy.observe("a", 13 * MB, 1.0, True)
    assert policy.estimate("b") == pytest.approx((2.8, 0.72))  # healed by an attempt on the other
    assert policy.shares(["a", "b"]) == pytest.approx([13 / (13 + 2.8 * 0.72), 2.016 / 15.016])


def test_published_failures_raise_a_slow_relay_to_20_mb_s() -> None:
    """H02: a failing 1 MB/s relay climbs to 20 'MB/s' after three failures: 9.7, 15.79, 20.053."""
    published, fixed = MovingAverage(failures="published"), MovingAverage(failures="fixed")
    for policy in (published, fixed):
        policy.observe("slow", MB, 1.0, True)
    seen = []
    for _ in range(3):
        published.observe("slow", 0, 30.0, False)
        fixed.observe("slow", 0, 30.0, False)
        seen.append(published.estimate("slow")[0])
    assert seen == pytest.approx([9.7, 15.79, 20.053])
    assert fixed.estimate("slow")[0] == pytest.approx(0.343)  # failures lower an estimate, never raise it


def test_a_failure_that_came_fast_does_not_raise_the_fixed_rule() -> None:
    policy = averages(a=10)
    policy.observe("a", 49 * MB, 1.0, False)
    assert policy.estimate("a")[0] == 10.0


@pytest.mark.parametrize(("failures", "lowest", "highest"), [("fixed", 0.0001, 0.01), ("published", 0.1, 0.3)])
def test_a_dead_relay_is_tried_again_now_and_then(
    failures: Literal["fixed", "published"], lowest: float, highest: float
) -> None:
    """Healing: q falls by 0.7 per attempt on it and rises by 0.01 per attempt on any: small but never zero. With the
    published quirk the dead relay is believed to give 30 MB/s, and takes a fifth of all requests."""
    policy = MovingAverage(failures=failures)
    for relay in ("live", "dead"):
        policy.observe(relay, 20 * MB, 1.0, True)
    chance, asked = rng(3), 0
    for _ in range(4000):
        relay = policy.choose(chance, 0.0, ["live", "dead"], 50 * MB)
        asked += relay == "dead"
        policy.observe(relay, 20 * MB if relay == "live" else 0, 1.0 if relay == "live" else 30.0, relay == "live")
    assert lowest < asked / 4000 < highest


def test_choices_follow_the_shares() -> None:
    policy = averages(a=12, b=6, c=2)
    counts = dict.fromkeys("abc", 0)
    chance = rng(5)
    for _ in range(20_000):
        counts[policy.choose(chance, 0.0, list("abc"), MB)] += 1
    for relay, share in zip("abc", (0.6, 0.3, 0.1), strict=True):
        assert counts[relay] / 20_000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 20_000))


def test_all_zero_weights_raise() -> None:
    assert averages(a=0, b=0).shares(["a", "b"]) == [0.5, 0.5]  # but the fixed rule goes on
    policy = MovingAverage(failures="published")
    for relay in ("a", "b"):
        policy.observe(relay, 0, 1.0, True)
    with pytest.raises(ValueError, match="weight zero"):
        policy.choose(rng(), 0.0, ["a", "b"], MB)
    assert policy.choose(rng(), 0.0, ["a"], MB) == "a"  # one of one is no choice


# ------------------------------------------------------------------------------------------------- expected finish
def test_the_sooner_finish_wins_not_the_higher_bandwidth() -> None:
    policy = ExpectedFinish()
    for _ in range(20):
        policy.observe("near", 30 * MB, 1.0, True, first_byte_s=0.001)
        policy.observe("far", 60 * MB, 1.0, True, first_byte_s=0.6)
    assert policy.expected_s("near", 0.0, MB) < policy.expected_s("far", 0.0, MB)
    assert policy.expected_s("far", 0.0, 500 * MB) < policy.expected_s("near", 0.0, 500 * MB)


def test_own_transfers_in_flight_count() -> None:
    policy = ExpectedFinish()
    for relay, rate in (("a", 30), ("b", 20)):
        for _ in range(20):
            policy.observe(relay, rate * MB, 1.0, True)
    assert policy.choose(rng(), 0.0, ["a", "b"], 50 * MB) == "a"
    policy.begin("a", 0.0, 50 * MB)
    assert policy.choose(rng(), 0.0, ["a", "b"], 50 * MB) == "b"
    policy.release("a")
    assert policy.choose(rng(), 0.0, ["a", "b"], 50 * MB) == "a"


@pytest.mark.parametrize("received_mb", [0, 1, 500])
def test_a_failure_never_raises_an_estimate(received_mb: int) -> None:
    policy = ExpectedFinish()
    policy.observe("a", 10 * MB, 1.0, True)
    before = policy.rate_bytes_per_s("a"), policy.expected_s("a", 0.0, 50 * MB)
    policy.observe("a", received_mb * MB, 1.0, False)
    assert policy.rate_bytes_per_s("a") <= before[0] and policy.expected_s("a", 0.0, 50 * MB) > before[1]


def test_an_unused_relay_is_tried_again_when_it_may_have_changed() -> None:
    policy = ExpectedFinish(Beliefs(drift_per_s=0.01))
    for _ in range(10):
        policy.observe("good", 40 * MB, 1.0, True, now_s=0.0)
        policy.observe("bad", 4 * MB, 1.0, True, now_s=0.0)
    chance = rng(1)

    def share_of_bad(now_s: float) -> float:
        policy.observe("good", 40 * MB, 1.0, True, now_s=now_s)
        return sum(policy.choose(chance, now_s, ["good", "bad"], 50 * MB) == "bad" for _ in range(2000)) / 2000

    assert share_of_bad(1.0) == 0.0 and 0.01 < share_of_bad(300.0) < 0.5


def test_hints_say_nothing_about_a_measured_relay() -> None:
    policy = ExpectedFinish()
    policy.hint("a", rtt_s=0.05, rate_bytes_per_s=1e6)
    assert policy.rate_bytes_per_s("a") == pytest.approx(1e6)
    policy.observe("a", 50 * MB, 1.0, True)
    measured = policy.rate_bytes_per_s("a")
    policy.hint("a", rate_bytes_per_s=1e6)
    assert policy.rate_bytes_per_s("a") == measured > 1e7


# ----------------------------------------------------------------------------------------------------- fetch plan
def plan(policy: RelayChoice | None = None, shards: int = 3, **rules: float) -> FetchPlan:
    made = FetchPlan(policy or ExpectedFinish(), FetchRules(**rules))  # type: ignore[arg-type]
    made.offer((index, 1000, 0) for index in range(shards))
    return made


def start(fetching: FetchPlan, now_s: float, relays: Sequence[str]) -> Fetch:
    step = fetching.next(now_s, rng(), relays)
    assert isinstance(step, Fetch), step
    return step


def test_every_shard_is_asked_for_once_and_no_more_than_the_connections_allow() -> None:
    fetching = plan(shards=3, connections=2)
    first, second = start(fetching, 0.0, ["a"]), start(fetching, 0.0, ["a"])
    assert {first.index, second.index} == {0, 1} and fetching.next(0.0, rng(), ["a"]) == Wait(math.inf)
    assert fetching.arrived(first.ticket, 1.0) == []
    third = start(fetching, 1.0, ["a"])
    assert third.index == 2
    for fetch in (second, third):
        fetching.arrived(fetch.ticket, 2.0)
    assert fetching.next(2.0, rng(), ["a"]) is None and fetching.left == 0


def test_a_failed_shard_goes_on_elsewhere_from_where_it_was_after_a_pause_that_doubles() -> None:
    fetching = plan(shards=1, retry_s=1.0, retry_s_max=3.0)
    now_s, pauses, relays = 0.0, [], []
    for attempt in range(6):
        fetch = start(fetching, now_s, ["a", "b"])
        assert fetch.offset == 100 * attempt
        relays.append(fetch.relay)
        fetching.failed(fetch.ticket, now_s, rng(attempt), offset=100 * (attempt + 1))
        wait = fetching.next(now_s, rng(), ["a", "b"])
        assert isinstance(wait, Wait)
        pauses.append(wait.until_s - now_s)
        now_s = wait.until_s
    assert all(0.5 * full <= pause <= full for pause, full in zip(pauses, (1, 2, 3, 3, 3, 3), strict=True))
    assert all(set(relays[i : i + 2]) == {"a", "b"} for i in (0, 2, 4))  # never the same one twice before the other


def test_one_live_relay_is_enough() -> None:
    fetching = plan(shards=1, retry_s=0.1)
    for now_s in (0.0, 1.0, 2.0):
        fetch = start(fetching, now_s, ["only"])
        fetching.failed(fetch.ticket, now_s, rng(), offset=0)
    assert start(fetching, 9.0, ["only"]).relay == "only"
    assert plan().next(0.0, rng(), []) == Wait(math.inf)


def test_a_wrong_shard_bans_its_relay_and_only_that_shard_is_fetched_again() -> None:
    fetching = plan(shards=2)
    fetches = [start(fetching, 0.0, ["bad"]), start(fetching, 0.0, ["bad"])]
    fetching.arrived(fetches[0].ticket, 1.0)
    fetching.corrupt(fetches[1].ticket, 1.0, culprit="bad")
    assert fetching.banned == {"bad": "sent a wrong shard 1"}
    again = start(fetching, 1.0, ["bad", "good"])
    assert (again.index, again.relay, again.offset) == (1, "good", 0)
    fetching.arrived(again.ticket, 2.0)
    assert fetching.next(2.0, rng(), ["bad", "good"]) is None


ENDINGS = ("arrived", "stopped", "failed", "not yet", "left", "wrong", "wrong, nobody knows whose")


def lie(fetching: FetchPlan, now_s: float, relay: str) -> None:
    fetch = start(fetching, now_s, [relay])
    fetching.corrupt(fetch.ticket, now_s, culprit=relay)


def test_when_all_relays_lied_the_last_resort_is_asked_at_once() -> None:
    fetching = plan(shards=2)
    for relay in ("a", "b"):
        lie(fetching, 1.0, relay)
    steps = [fetching.next(1.0, rng(), ["a", "b"], "origin") for _ in range(2)]
    assert [step.relay for step in steps if isinstance(step, Fetch)] == ["origin", "origin"] and fetching.all_lied
    later = fetching.next(1000.0, rng(), ["a", "b"], "origin")
    assert isinstance(later, Wait)  # nobody is forgiven while it delivers


def test_without_a_last_resort_the_least_guilty_is_forgiven_one_transfer_at_a_time() -> None:
    fetching = plan(shards=4, forgive_s=5.0)
    fetches = [start(fetching, 0.0, ["a"]), start(fetching, 0.0, ["a"])]
    for fetch in fetches:
        fetching.corrupt(fetch.ticket, 1.0, culprit="a")
    lie(fetching, 1.0, "b")
    assert fetching.next(1.0, rng(), ["a", "b"]) == Wait(6.0)
    pardoned = start(fetching, 6.0, ["a", "b"])
    assert pardoned.relay == "b"  # one wrong shard against two
    assert isinstance(fetching.next(6.0, rng(), ["a", "b"]), Wait)  # one at a time
    fetching.arrived(pardoned.ticket, 7.0)
    again = start(fetching, 7.0, ["a", "b"])
    fetching.corrupt(again.ticket, 8.0, culprit="b")
    assert fetching.next(8.0, rng(), ["a", "b"]) == Wait(18.0)  # twice as long
    assert start(fetching, 18.0, ["a", "b"]).relay == "a"  # two each by now, the first by name


def test_a_last_resort_that_is_dead_does_not_stand_in_the_way_of_a_pardon() -> None:
    fetching = plan(shards=1, forgive_s=5.0, retry_s=0.1)
    lie(fetching, 0.0, "a")
    dead = fetching.next(0.0, rng(), ["a"], "origin")
    assert isinstance(dead, Fetch) and dead.relay == "origin"
    fetching.failed(dead.ticket, 1.0, rng(), offset=0)
    step = fetching.next(6.0, rng(), ["a"], "origin")
    assert isinstance(step, Fetch) and step.relay == "a"  # the origin has just failed at this shard


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ENDINGS), st.integers(0, 9), st.sampled_from("abc")), max_size=80))
def test_no_shard_is_ever_lost(happenings: list[tuple[str, int, str]]) -> None:
    """However transfers end, a shard that has not arrived is fetched again: once the relays are honest, all come."""
    fetching, now_s, dice = plan(shards=4, connections=3, forgive_s=1.0), 0.0, rng()
    under_way: list[Fetch] = []
    for how, which, relay in happenings:
        now_s += 0.4
        while isinstance(step := fetching.next(now_s, dice, ["a", "b", "c"]), Fetch):
            under_way.append(step)
        if how == "left":
            gone = set(fetching.leave(relay, lambda index: 0))
            under_way = [fetch for fetch in under_way if fetch.ticket not in gone]
        elif under_way:
            end(fetching, how, under_way.pop(which % len(under_way)), now_s, dice)
    for fetch in under_way:
        end(fetching, "stopped", fetch, now_s, dice)
    for _ in range(1000):
        step = fetching.next(now_s, dice, ["a", "b", "c"])
        if isinstance(step, Fetch):
            fetching.arrived(step.ticket, now_s)
        elif step is None:
            return
        else:
            assert step.until_s < math.inf, "waits for ever, and nothing is under way"
            now_s = max(step.until_s, now_s + 1e-3)
    raise AssertionError(f"{fetching.left} shards never came")


def end(fetching: FetchPlan, how: str, fetch: Fetch, now_s: float, dice: np.random.Generator) -> None:
    """One way in which a transfer can end."""
    match how:
        case "arrived":
            fetching.arrived(fetch.ticket, now_s)
        case "stopped":
            fetching.stopped(fetch.ticket, offset=0)
        case "failed":
            fetching.failed(fetch.ticket, now_s, dice, offset=0)
        case "not yet":
            fetching.not_yet(fetch.ticket, now_s)
        case "wrong, nobody knows whose":
            fetching.corrupt(fetch.ticket, now_s, None)
        case _:
            fetching.corrupt(fetch.ticket, now_s, fetch.relay)


def test_a_wrong_shard_from_two_relays_is_fetched_from_one_at_a_time() -> None:
    fetching = plan(shards=1, retry_s=0.1)
    fetch = start(fetching, 0.0, ["a", "b"])
    fetching.corrupt(fetch.ticket, 1.0, culprit=None)
    assert fetching.banned == {}
    again = start(fetching, 1.0, ["a", "b"])
    fetching.failed(again.ticket, 2.0, rng(), offset=700)
    assert start(fetching, 9.0, ["a", "b"]).offset == 0  # not on from another relay's bytes


def test_a_relay_that_does_not_have_a_shard_yet_has_not_failed() -> None:
    policy = ExpectedFinish()
    fetching = plan(policy, shards=1, not_yet_s=0.25)
    before = policy.expected_s("a", 0.0, 1000)
    fetch = start(fetching, 0.0, ["a"])
    fetching.not_yet(fetch.ticket, 0.1)
    assert policy.expected_s("a", 0.0, 1000) == before
    wait = fetching.next(0.1, rng(), ["a"])
    assert wait == Wait(0.35)
    assert start(fetching, 0.1, ["a", "b"]).relay == "b"  # a relay that has come


def test_a_shard_that_a_relay_now_has_is_asked_for_at_once() -> None:
    fetching = plan(shards=1, not_yet_s=60.0)
    fetching.not_yet(start(fetching, 0.0, ["a"]).ticket, 0.1)
    assert fetching.next(0.1, rng(), ["a"]) == Wait(60.1)
    fetching.has("a", 0)
    assert start(fetching, 0.2, ["a"]).index == 0
    assert isinstance(fetching.next(61.0, rng(), ["a"]), Wait)  # and not once more when the pause ends


def test_the_last_shards_are_asked_for_twice_where_it_pays() -> None:
    policy = ExpectedFinish()
    for relay in ("slow", "fast"):
        for _ in range(20):
            policy.observe(relay, 1000, 1.0, True)
    fetching = plan(policy, shards=1)
    first = start(fetching, 0.0, ["slow"])
    fetching.progress(first.ticket, 10, 1.0)  # 99 s to go
    hedge = start(fetching, 1.0, ["slow", "fast"])
    assert (hedge.relay, hedge.offset, hedge.hedge) == ("fast", 10, True)
    assert isinstance(fetching.next(1.0, rng(), ["slow", "fast", "third"]), Wait)  # two copies are enough
    assert fetching.arrived(hedge.ticket, 2.0) == [first.ticket]
    fetching.stopped(first.ticket, offset=0)
    assert fetching.next(2.0, rng(), ["slow", "fast"]) is None


def test_no_second_request_while_first_ones_are_left_or_when_it_gains_nothing() -> None:
    policy = ExpectedFinish()
    for relay in ("a", "b"):
        for _ in range(20):
            policy.observe(relay, 1000, 1.0, True)
    fetching = plan(policy, shards=1)
    first = start(fetching, 0.0, ["a"])
    fetching.progress(first.ticket, 900, 1.0)
    assert isinstance(fetching.next(1.0, rng(), ["a", "b"]), Wait)


def test_stalls_and_slow_drips_are_named() -> None:
    policy = ExpectedFinish()
    for _ in range(20):
        policy.observe("good", 1000, 1.0, True)
    fetching = plan(policy, shards=2, stall_s=5.0, drip=10.0)
    still, drip = start(fetching, 0.0, ["x"]), start(fetching, 0.0, ["x"])
    for second in range(1, 8):
        fetching.progress(drip.ticket, second, float(second))
    assert fetching.overdue(4.9, ["x", "good"]) == []
    assert fetching.overdue(7.5, ["x", "good"]) == [still.ticket, drip.ticket]


# -------------------------------------------------------------------------------------------- policy against policy
@dataclass
class Relay:
    rate: float  # bytes per second to this client, shared by its transfers
    rtt_s: float = 0.02
    dies_at_s: float = math.inf


def fluid(
    policy: RelayChoice, relays: dict[str, Relay], *, shards: int, size: int, downlink: float, seed: int
) -> float:
    """Seconds until all shards are there, in a fluid model: relays share their rate, the client its downlink. Each
    relay is probed once with 1 MB first, as the original does."""
    for name, relay in relays.items():
        policy.begin(name, 0.0, MB)
        policy.observe(name, MB, relay.rtt_s + MB / relay.rate, True, first_byte_s=relay.rtt_s)
    fetching = FetchPlan(policy)
    fetching.offer((index, size, 0) for index in range(shards))
    chance, now_s = rng(seed), 0.0
    running: dict[int, tuple[Fetch, float, float]] = {}  # ticket -> fetch, started, bytes
    while True:
        step = fetching.next(now_s, chance, list(relays))
        if step is None:
            return now_s
        if isinstance(step, Fetch):
            running[step.ticket] = (step, now_s, 0.0)
            continue
        tick = 0.01
        flowing = [f for f, since, _ in running.values() if now_s >= since + relays[f.relay].rtt_s]
        live = [f for f in flowing if now_s < relays[f.relay].dies_at_s]
        rates = {f.ticket: relays[f.relay].rate / sum(g.relay == f.relay for g in live) for f in live}
        scale = min(1.0, downlink / sum(rates.values())) if rates else 1.0
        now_s += tick
        for ticket in list(running):
            if ticket not in running:
                continue
            fetch, since, received = running[ticket]
            received += tick * scale * rates.get(ticket, 0.0)
            running[ticket] = (fetch, since, received)
            fetching.progress(ticket, int(min(received, size - fetch.offset)), now_s)
            if received >= size - fetch.offset:
                del running[ticket]
                for other in fetching.arrived(ticket, now_s):
                    fetching.stopped(other, offset=0)
                    del running[other]
        for ticket in fetching.overdue(now_s, list(relays)):
            fetch, _, received = running.pop(ticket)
            fetching.failed(ticket, now_s, chance, offset=fetch.offset + int(received))


UNEQUAL = {"a": Relay(40e6), "b": Relay(20e6), "c": Relay(4e6, rtt_s=0.2), "d": Relay(1e6, rtt_s=0.3)}


@pytest.mark.parametrize("seed", range(3))
def test_expected_finish_is_near_the_optimum_and_no_worse_than_the_original(seed: int) -> None:
    shards, size = 120, 10 * MB
    optimum_s = shards * size / sum(relay.rate for relay in UNEQUAL.values())
    ours = fluid(ExpectedFinish(), UNEQUAL, shards=shards, size=size, downlink=1e9, seed=seed)
    theirs = fluid(MovingAverage(), UNEQUAL, shards=shards, size=size, downlink=1e9, seed=seed)
    assert optimum_s <= ours < 1.15 * optimum_s
    assert ours < theirs


def test_it_gets_by_when_the_best_relay_dies() -> None:
    relays = {**UNEQUAL, "a": Relay(40e6, dies_at_s=3.0)}
    shards, size = 60, 10 * MB
    left = shards * size - 3.0 * 65e6
    optimum_s = 3.0 + left / 25e6
    ours = fluid(ExpectedFinish(), relays, shards=shards, size=size, downlink=1e9, seed=1)
    assert ours < 1.6 * optimum_s
