"""The wire between real nodes: bytes take their turns, each direction is delayed once, and what is cut is cut."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import selectors
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

import pytest

from refimpl.messages import Message, encode, name_of, wire
from refimpl.world import Timeout, Unreachable
from refimpl.worlds.asyncio_node import Supervisor
from refimpl.worlds.http import HttpWorld
from refimpl.worlds.links import Links
from refimpl.worlds.wire import Wire
from sim.carrier import FlowCarrier
from sim.network import Network
from sim.scenario import Scenario
from sim.wire import ScenarioRules
from sim.world import SimFabric

T = TypeVar("T")


@wire
@dataclass(frozen=True)
class Postcard(Message):
    raw: bytes


# --------------------------------------------------------------------------------------------------------- the links
class _Jump(selectors.DefaultSelector):
    """Where the loop would sleep, its clock jumps."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now_s += timeout or 0.0
        return super().select(0)


def in_virtual_time(body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that only waits for timers: exact, at once, however busy the machine is."""
    selector = _Jump()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(body)
    finally:
        loop.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


def carried(rates: dict[int, float], *transfers: tuple[tuple[int, ...], int, float]) -> list[float]:
    """Seconds that each transfer (links, bytes, start) took, all on the same links."""

    async def body() -> list[float]:
        links = Links(lambda link: rates[link])

        async def one(path: tuple[int, ...], size: int, start_s: float) -> float:
            await asyncio.sleep(start_s)
            begun_s = now_s()
            passed_s = await links.carry(path, size, inf, lambda: False)
            assert passed_s is not None
            return passed_s - begun_s

        return list(await asyncio.gather(*(one(*transfer) for transfer in transfers)))

    return in_virtual_time(body())


@pytest.mark.parametrize(
    ("transfers", "expected_s"),
    [
        ([((1, 3), 50_000, 0.0)], [0.5]),  # alone: the narrower of its links
        ([((1,), 25_000, 0.0)] * 2, [0.5, 0.5]),  # equal turns
        ([((1,), 50_000, 0.0), ((1,), 25_000, 0.2)], [0.75, 0.5]),  # a late joiner takes half from then on
        # what the slow one of three cannot take goes to the others: 10 of 250, then 120 each
        ([((4, 3), 5_000, 0.0), ((1, 3), 50_000, 0.0), ((2, 3), 50_000, 0.0)], [0.5, 0.5, 0.5]),
    ],
)
def test_flows_share_as_max_min_fairness_says(transfers: Any, expected_s: list[float]) -> None:
    rates = {1: 100_000.0, 2: 100_000.0, 3: 210_000.0, 4: 10_000.0}
    assert carried(rates, *transfers) == pytest.approx(expected_s, rel=0.06)


def test_a_bound_of_its_own_holds_a_flow_on_an_empty_link() -> None:
    async def body() -> float:
        begun_s = now_s()
        passed_s = await Links(lambda link: 1e6).carry((1,), 20_000, 40_000.0, lambda: False)
        assert passed_s is not None
        return passed_s - begun_s

    assert in_virtual_time(body()) == pytest.approx(0.5, rel=0.02)


def test_a_flow_stalls_on_a_dead_link_and_goes_on_when_it_carries_again() -> None:
    rates = {1: 100_000.0}

    async def body() -> float:
        links = Links(lambda link: rates[link])
        begun_s = now_s()
        carrying = asyncio.ensure_future(links.carry((1,), 40_000, inf, lambda: False))
        for instant_s, rate in ((0.1, 0.0), (0.4, 100_000.0)):
            await asyncio.sleep(begun_s + instant_s - now_s())
            rates[1] = rate
            links.changed()
        passed_s = await carrying
        assert passed_s is not None
        return passed_s - begun_s

    assert in_virtual_time(body()) == pytest.approx(0.7, abs=0.06)  # 0.4 of work, 0.3 of standing still


# ------------------------------------------------------------------------------------------------ calls over the wire
def scenario(**network: Any) -> Scenario:
    """A hub and two nodes, 80 + 120 ms apart one way; far is reached through the hub alone."""
    line = {"device": "L4", "uplink_mbit_s": 8.0, "downlink_mbit_s": 8.0}
    roles = [("ledger", "hub"), ("orchestrator", "o"), ("validator", "v"), ("worker", "near"), ("worker", "far")]
    nodes = [{"name": name, "role": role, "latency_ms": 80.0, **line} for role, name in roles]
    nodes[0]["latency_ms"] = 120.0
    nodes[3]["uplink_mbit_s"] = 0.8
    nodes[4] |= {"nat": "relay_only", "relay": "hub"}
    faults = [
        {"kind": "link", "nodes": ["near"], "start_s": 1.0, "working": False, "direction": "up"},
        {"kind": "link", "nodes": ["near"], "start_s": 1.0, "message_loss": 1.0, "direction": "up"},
    ]
    return Scenario.model_validate(
        {
            "title": "t", "shows": "t", "duration_s": 60.0, "model": {"path": "tests/data/tiny-model"},
            "network": network, "nodes": nodes, "faults": faults,
        }
    )  # fmt: skip


class Town:
    """Nodes over one wire, all in this process."""

    def __init__(self, **network: Any) -> None:
        self.log = io.StringIO()
        self.rules = ScenarioRules(scenario(**network), seed=1)
        self.book: dict[str, str] = {}
        self.worlds: dict[str, HttpWorld] = {}

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        async def body() -> Any:
            self.wire = Wire(self.rules, self.log)
            url, supervisor = await self.wire.start(), Supervisor()
            for name in ("hub", "near", "far"):
                world = self.worlds[name] = HttpWorld(name, book=self.book, supervisor=supervisor)
                self.wire.order({"at": {name: await world.start()}})
                self.book[name] = f"{url}/to/{name}"
                world.serve({Postcard: echo})
            try:
                return await supervisor.run(main)
            finally:
                for world in self.worlds.values():
                    await world.stop()
                await self.wire.stop()

        return asyncio.run(body())

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


async def echo(source: str, message: Postcard) -> Message:
    return Postcard(message.raw[:1])


def takes(seconds: float, expected_s: float) -> None:
    """Never less, and not much more: other processes of this machine want its cores too."""
    assert expected_s - 0.01 <= seconds <= expected_s + 0.25, (seconds, expected_s)


def three_tries(test: Callable[[], None]) -> Callable[[], None]:
    """By a real clock, on a machine that may stand still for a moment: what is right comes out right once in three."""

    @functools.wraps(test)
    def tried() -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                return test()
        return test()

    return tried


async def timed(call: Any) -> float:
    begun_s = time.monotonic()
    await call
    return time.monotonic() - begun_s


@three_tries
def test_each_direction_is_delayed_once_and_bytes_take_the_senders_uplink() -> None:
    town = Town()

    async def main() -> list[float]:
        near = town.worlds["near"]
        return [await timed(near.call("hub", Postcard(b"x" * size), 10.0)) for size in (1, 1, 50_000)]

    _, short_s, long_s = town.run(main())
    takes(short_s, 2 * 0.2)
    takes(long_s, 2 * 0.2 + 0.5)  # 50 kB at 0.8 Mbit/s
    call = town.calls()[-1]
    assert (call["source"], call["target"], call["kind"], call["outcome"]) == ("near", "hub", "Postcard", "answered")
    takes((call["came_ns"] - call["begun_ns"]) / 1e9, 0.2 + 0.5)
    takes((call["ended_ns"] - call["answered_ns"]) / 1e9, 0.2)


@three_tries
def test_a_relayed_call_pays_both_hops_and_takes_the_relays_line() -> None:
    town = Town()

    async def main() -> float:
        near = town.worlds["near"]
        await near.call("far", Postcard(b""), 10.0)
        return await timed(near.call("far", Postcard(b""), 10.0))

    takes(town.run(main()), 2 * (0.08 + 0.12 + 0.12 + 0.08))


@three_tries
def test_what_goes_over_a_dead_line_waits_until_it_is_mended() -> None:
    town = Town()

    async def main() -> float:
        near, hub = town.worlds["near"], town.worlds["hub"]
        town.wire.order({"fault": 0, "begins": True})
        with pytest.raises(Timeout):
            await near.call("hub", Postcard(b""), 0.3)
        begun_s = time.monotonic()
        asking = asyncio.ensure_future(hub.call("near", Postcard(b"x"), 10.0))  # its way in is open
        await asyncio.sleep(0.6)
        town.wire.order({"fault": 0, "begins": False})
        await asking
        return time.monotonic() - begun_s

    takes(town.run(main()), 0.6 + 0.2)


@three_tries
def test_lost_messages_leave_their_caller_waiting_and_dead_nodes_are_unreachable_after_the_way_back() -> None:
    town = Town()

    async def main() -> float:
        near = town.worlds["near"]
        town.wire.order({"fault": 1, "begins": True})
        with pytest.raises(Timeout):
            await near.call("hub", Postcard(b""), 0.5)
        town.wire.order({"fault": 1, "begins": False})
        (waiting,) = town.wire.order({"ask": "open"})["open"]  # type: ignore[index]
        assert (waiting["waiting"], waiting["target"], waiting["message"]) == ("near", "hub", "Postcard")
        town.wire.order({"at": {"hub": None}})
        begun_s = time.monotonic()
        with pytest.raises(Unreachable, match="'hub' is down"):
            await near.call("hub", Postcard(b""), 10.0)
        return time.monotonic() - begun_s

    takes(town.run(main()), 2 * 0.2)


def test_jitter_is_seeded_by_node_and_drawn_as_the_scenario_says() -> None:
    law = {"jitter": {"kind": "uniform", "parameters": [0.1, 0.2]}}

    def delays(source: str) -> list[float]:
        rules = ScenarioRules(scenario(**law), seed=7)
        return [rules.passage(source, "hub", "Postcard", 10, reply=False).delays_s[0] for _ in range(5)]

    assert delays("near") == delays("near") != delays("v")
    assert all(0.3 <= delay_s <= 0.4 for delay_s in delays("near")) and len(set(delays("near"))) == 5


def test_the_name_of_a_message_is_read_without_decoding_it() -> None:
    assert name_of(encode(Postcard(b"abc"))) == "Postcard"


def test_the_simulator_lets_packets_share_a_slow_line_as_real_ones_do() -> None:
    """Found by comparing: the first of several packets sent at once must not have a slow line for itself."""
    network = Network()
    fabric = SimFabric(run_seed=1, carrier=lambda kernel: FlowCarrier(kernel, network, 1))
    for name, uplink_mbit_s in (("a", 0.02), ("b", 100.0)):
        fabric.node(name).serve({Postcard: echo})
        network.add_node(name=name, uplink_mbit_s=uplink_mbit_s, downlink_mbit_s=100.0)
    a = fabric.nodes["a"]

    async def one() -> float:
        await a.call("b", Postcard(b"x" * 1000), 60.0)
        return a.now()

    async def main() -> list[float]:
        return await a.gather(*(one() for _ in range(4)))

    size = len(encode(Postcard(b"x" * 1000)))
    assert fabric.run(main()) == pytest.approx([4 * size / 2500] * 4, rel=0.01)
