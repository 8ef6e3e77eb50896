"""The kernel's clock and order, and chance that belongs to a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refimpl.messages import Message, Ok, wire
from sim.carrier import FlowCarrier
from sim.chance import Chance
from sim.kernel import BUCKET_NS, CALLED_OFF_MIN, LATE, Kernel
from sim.network import Network
from sim.world import SimFabric
from tests.worlds import sim_fabric

TIMES = st.one_of(st.integers(0, 5), st.integers(0, 5 * BUCKET_NS), st.sampled_from([BUCKET_NS - 1, BUCKET_NS]))


@given(st.lists(st.tuples(TIMES, st.sampled_from([0, 1, LATE]), st.integers(0, 3)), min_size=1, max_size=60))
def test_events_happen_by_time_priority_node_and_sequence(entries: list[tuple[int, int, int]]) -> None:
    """Whether they lie in the heap or in a bucket of the far future, and whoever plans more when one happens."""
    kernel = Kernel()
    happened: list[tuple[int, int, int, int]] = []

    def plan(place: int, base_ns: int) -> None:
        delay_ns, priority, node = entries[place]
        kernel.call_at(node, base_ns + delay_ns, happen, (priority, node, place), priority)

    def happen(what: tuple[int, int, int]) -> None:
        happened.append((kernel._now, *what))
        if what[2] + 10 < len(entries):
            plan(what[2] + 10, kernel._now)

    for place in range(min(10, len(entries))):
        plan(place, 0)
    first = sorted(((*entries[place], place) for place in range(min(10, len(entries)))), key=lambda entry: entry[:3])
    kernel.run_through(1 << 62)
    assert len(happened) == len(entries) and [now for now, *_ in happened] == sorted(now for now, *_ in happened)
    assert [place for *_, place in happened if place < 10] == [place for *_, place in first]
    assert kernel.peek() == float("inf")


def test_the_clock_stops_where_it_was_told_to() -> None:
    kernel = Kernel()
    seen: list[int] = []
    for time_ns in (3, 7 * BUCKET_NS, 7 * BUCKET_NS + 1):
        kernel.call_at(0, time_ns, seen.append, time_ns)
    kernel.run_through(7 * BUCKET_NS)
    assert seen == [3, 7 * BUCKET_NS] and kernel.now == 7 * BUCKET_NS and kernel.peek() == 7 * BUCKET_NS + 1
    kernel.call_at(0, 7 * BUCKET_NS, seen.append, -1)
    kernel.run_through(8 * BUCKET_NS)
    assert seen == [3, 7 * BUCKET_NS, -1, 7 * BUCKET_NS + 1]


def test_a_message_draws_numbers_of_its_own() -> None:
    """Uniform over messages that differ in one thing only: channel, instant, or place within the instant."""
    chance = Chance(5)
    for vary in range(3):
        numbers = []
        for i in range(20_000):
            channel, now_ns = (i if vary == 0 else 7), (i * 60_000_000_000 if vary == 1 else 9 if vary == 2 else i)
            numbers.append(chance.of(channel, now_ns).random())
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert abs(counts - 1000).max() < 5 * np.sqrt(950)  # five standard deviations of a bin
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(20_000)
    again = Chance(5)
    assert [again.of(3, 4).random(), again.of(3, 4).random()] != [again.of(3, 4).random()] * 2
    assert Chance(5).of(3, 4).random() == Chance(5).of(3, 4).random() != Chance(6).of(3, 4).random()


@wire
@dataclass(frozen=True)
class Numbered(Message):
    """A small question."""

    number: int


def arrivals(names: tuple[str, ...], late: str) -> dict[tuple[str, int], float]:
    """When each node's ten questions came to the hub; `late` asks at other times than the rest."""
    network = Network(regions={("here", "here"): 20.0}, jitter_ms=5.0)
    fabric = SimFabric(run_seed=3, carrier=lambda kernel: FlowCarrier(kernel, network, 3))
    came: dict[tuple[str, int], float] = {}
    for name in sorted(names):  # as `sim.fabric.build` does
        fabric.node(name)
        network.add_node(name=name, uplink_mbit_s=50.0, downlink_mbit_s=50.0, region="here")

    async def answer(source: str, question: Numbered) -> Message:
        came[source, question.number] = fabric.now_s()
        return Ok()

    async def ask(name: str) -> None:
        await fabric.nodes[name].sleep(0.5 if name == late else 0.0)
        for i in range(10):
            await fabric.nodes[name].call("hub", Numbered(i), 10.0)
            await fabric.nodes[name].sleep(1.0)

    fabric.nodes["hub"].serve({Numbered: answer})
    fabric.run(fabric.nodes["hub"].gather(*(ask(name) for name in sorted(names) if name != "hub")), node="hub")
    return came


def test_a_node_more_changes_nothing_for_the_others() -> None:
    few = arrivals(("hub", "a", "c"), late="b")
    more = arrivals(("b", "hub", "c", "a"), late="b")
    assert len(few) == 20 and len(more) == 30
    assert {key: more[key] for key in few} == few


def test_timers_that_were_called_off_do_not_pile_up() -> None:
    """A wait of a day that ends after a second leaves nothing for a day; what is still to come comes in its order."""
    fabric = sim_fabric(run_seed=1)
    node = fabric.node("a")
    woke: list[float] = []

    async def wait(name: int) -> None:
        signal = node.signal()
        node.spawn(waits(signal, name), "waits")
        await node.sleep(1.0 + name * 1e-6)
        signal.set()

    async def waits(signal: Any, name: int) -> None:
        if not await signal.wait(86_400.0 if name % 10 else 100.0 + name):
            woke.append(fabric.now_s())

    async def late(name: int) -> None:
        await node.signal().wait(5.0 + name)
        woke.append(fabric.now_s())

    async def main() -> None:
        for name in range(0, 50, 7):
            node.spawn(late(name), "late")
        await node.gather(*(wait(name) for name in range(10_000)))

    fabric.run(main(), node="a")
    assert fabric.kernel.pending() < 3 * CALLED_OFF_MIN
    fabric.kernel.halted = False
    fabric.kernel.run_through(10**11)
    assert woke == [5.0 + name for name in range(0, 50, 7)]


def test_timers_of_a_dead_node_are_dropped_too() -> None:
    fabric = sim_fabric(run_seed=1)
    for life in range(5):
        node = fabric.node("a")
        for _ in range(1000):
            node.spawn(node.sleep(86_400.0), "sleeps")
        fabric.kernel.run_through((life + 1) * 10**9)
        fabric.kill("a")
    assert fabric.kernel.pending() <= 2 * CALLED_OFF_MIN
