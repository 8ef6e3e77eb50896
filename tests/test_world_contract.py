"""The port's promises, one body for every world.

Nothing here asks which world it runs in. Durations are short for the wall clock and exact in virtual time, so bodies
assert orders and bounds, never equality of times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from refimpl.messages import Blob, Message, wire
from refimpl.work import Seconds
from refimpl.world import Refused, TaskFailed, Timeout, Unreachable, World
from refimpl.worlds.http import HttpFabric
from refimpl.worlds.local import LocalFabric
from tests.worlds import sim_fabric

PATIENCE_S = 20.0  # for what must not time out, however busy the machine


@wire
@dataclass(frozen=True)
class Ping(Message):
    number: int
    delay_s: float = 0.0


@wire
@dataclass(frozen=True)
class Pong(Message):
    number: int
    text: str = ""


@wire
@dataclass(frozen=True)
class Tensor(Message):
    values: np.ndarray
    raw: bytes


@wire
@dataclass(frozen=True)
class Parcel(Message):
    blob: Blob


FABRICS: dict[str, Callable[[], Any]] = {
    "local": lambda: LocalFabric(run_seed=7),
    "http": lambda: HttpFabric(run_seed=7),
    "sim": lambda: sim_fabric(run_seed=7),
}


@pytest.fixture(params=list(FABRICS))
def fabric(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield FABRICS[request.param]()


def echo(world: World) -> None:
    async def on_ping(source: str, message: Ping) -> Message:
        await world.sleep(message.delay_s)
        return Pong(message.number, source)

    world.serve({Ping: on_ping})


def test_a_call_brings_the_reply_and_names_the_caller(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    echo(b)
    assert fabric.run(a.call("b", Ping(3), PATIENCE_S)) == Pong(3, "a")


def test_a_node_may_call_itself(fabric: Any) -> None:
    a = fabric.node("a")
    echo(a)
    assert fabric.run(a.call("a", Ping(1), PATIENCE_S)) == Pong(1, "a")


def test_tensors_and_bytes_arrive_as_they_were(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")

    async def back(source: str, message: Tensor) -> Message:
        return Tensor(message.values[::-1], message.raw * 2)

    b.serve({Tensor: back})
    values = np.arange(30, dtype=np.float32).reshape(5, 3, 2)
    reply = fabric.run(a.call("b", Tensor(values, b"xyz"), PATIENCE_S))
    np.testing.assert_array_equal(reply.values, values[::-1])
    assert reply.raw == b"xyzxyz"


def test_a_blob_arrives_whole(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")

    async def back(source: str, message: Parcel) -> Message:
        return message

    b.serve({Parcel: back})
    blob = Blob(200_000, "id", bytes(range(250)) * 800)
    reply = fabric.run(a.call("b", Parcel(blob), PATIENCE_S)).blob
    assert (reply.size_bytes, reply.content_id, bytes(reply.data)) == (200_000, "id", blob.data)


def test_a_call_that_takes_too_long_raises_timeout(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    echo(b)
    with pytest.raises(Timeout, match="'b' did not answer Ping within 0.1 s"):
        fabric.run(a.call("b", Ping(1, delay_s=30.0), 0.1))


def test_the_callee_runs_once_and_lives_on_after_its_callers_timeout(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    begun: list[int] = []
    ended: list[int] = []

    async def slow(source: str, message: Ping) -> Message:
        begun.append(message.number)
        await b.sleep(0.5)
        ended.append(message.number)
        return Pong(message.number)

    b.serve({Ping: slow})

    async def main() -> None:
        with pytest.raises(Timeout):
            await a.call("b", Ping(1), 0.1)
        assert begun == [1] and ended == []
        await a.sleep(1.5)

    fabric.run(main())
    assert begun == [1] and ended == [1]


def test_an_unknown_node_is_unreachable(fabric: Any) -> None:
    a = fabric.node("a")
    with pytest.raises(Unreachable, match="there is no node 'nobody'"):
        fabric.run(a.call("nobody", Ping(1), PATIENCE_S))


def test_a_message_that_nobody_serves_is_refused(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    echo(b)
    with pytest.raises(Refused, match="node 'b' serves no Tensor"):
        fabric.run(a.call("b", Tensor(np.zeros(2), b""), PATIENCE_S))


def test_a_handler_may_refuse_with_its_own_reason(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")

    async def no(source: str, message: Ping) -> Message:
        raise Refused(f"not {source}, not today")

    b.serve({Ping: no})
    with pytest.raises(Refused, match="^not a, not today$"):
        fabric.run(a.call("b", Ping(1), PATIENCE_S))


def test_what_cannot_be_sent_is_refused_before_it_leaves(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    echo(b)

    class Unknown(Message):
        pass

    with pytest.raises(Refused, match="Unknown is not a wire message"):
        fabric.run(a.call("b", Unknown(), PATIENCE_S))


def test_a_node_serves_many_calls_at_once(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    waiting = 0
    together = b.signal()

    async def meet(source: str, message: Ping) -> Message:
        nonlocal waiting
        waiting += 1
        if waiting == 20:  # none of them is answered before all have come
            together.set()
        assert await together.wait(PATIENCE_S)
        return Pong(message.number)

    b.serve({Ping: meet})
    replies = fabric.run(a.gather(*(a.call("b", Ping(i), PATIENCE_S) for i in range(20))))
    assert [reply.number for reply in replies] == list(range(20))


def test_an_exception_in_a_handler_names_node_and_task_and_the_caller_is_refused(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    seen: list[str] = []

    async def broken(source: str, message: Ping) -> Message:
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "a bug")  # an exception with many arguments

    b.serve({Ping: broken})

    async def main() -> None:
        try:
            await a.call("b", Ping(1), PATIENCE_S)
        except Refused as refusal:
            seen.append(refusal.reason)
        await a.sleep(5.0)

    with pytest.raises(TaskFailed, match="node 'b', task 'handler of Ping': UnicodeDecodeError"):
        fabric.run(main())
    assert seen in ([], ["node 'b' failed inside its handler of Ping"])  # the run ends with the failure


def test_an_exception_in_a_spawned_task_ends_the_run_and_names_node_and_task(fabric: Any) -> None:
    a = fabric.node("a")

    async def broken() -> None:
        await a.sleep(0.01)
        raise KeyError("lost")

    async def main() -> None:
        a.spawn(broken(), "the broken one")
        await a.sleep(PATIENCE_S)

    with pytest.raises(TaskFailed, match="node 'a', task 'the broken one': KeyError: 'lost'"):
        fabric.run(main())


def test_a_spawned_task_outlives_its_parent(fabric: Any) -> None:
    a = fabric.node("a")
    done = []

    async def child() -> None:
        await a.sleep(0.05)
        done.append(True)

    async def parent() -> None:
        a.spawn(child())

    async def main() -> None:
        await a.gather(parent())
        assert not done
        await a.sleep(1.0)

    fabric.run(main())
    assert done == [True]


def test_gather_keeps_the_order_and_raises_the_first_failure_after_all_have_ended(fabric: Any) -> None:
    a = fabric.node("a")
    ended: list[str] = []

    async def step(label: str, delay_s: float, error: Exception | None = None) -> str:
        await a.sleep(delay_s)
        ended.append(label)
        if error is not None:
            raise error
        return label

    async def main() -> None:
        assert await a.gather(step("x", 0.3), step("y", 0.0)) == ["x", "y"]
        assert await a.gather() == []
        ended.clear()
        with pytest.raises(ValueError, match="first in order"):
            await a.gather(
                step("p", 0.3, ValueError("first in order")), step("q", 0.0, KeyError("first in time")), step("r", 0.6)
            )
        assert ended == ["q", "p", "r"]

    fabric.run(main())


def test_a_signal_wakes_all_who_wait_and_stays_set(fabric: Any) -> None:
    a = fabric.node("a")

    async def main() -> None:
        signal = a.signal()
        assert not signal.is_set()
        assert await signal.wait(0.01) is False

        async def setter() -> None:
            await a.sleep(0.05)
            signal.set()

        results = await a.gather(signal.wait(), signal.wait(PATIENCE_S), setter())
        assert results[:2] == [True, True]
        assert signal.is_set() and await signal.wait(0.0) is True

    fabric.run(main())


def test_sleep_is_never_short_and_time_never_goes_back(fabric: Any) -> None:
    a = fabric.node("a")

    async def main() -> None:
        last = a.now()
        for _ in range(20):
            await a.sleep(0.003)
            assert a.now() - last >= 0.003 - 1e-9
            last = a.now()
        with pytest.raises(ValueError, match="0 or more was expected"):
            await a.sleep(-1.0)

    fabric.run(main())


def test_compute_returns_the_result_raises_the_error_and_goes_in_the_order_asked(fabric: Any) -> None:
    a = fabric.node("a")
    order: list[int] = []

    def piece(number: int) -> int:
        time.sleep(0.01 if number == 0 else 0.0)
        order.append(number)
        return number * 10

    def broken() -> int:
        raise ArithmeticError("on the device")

    async def main() -> None:
        work = Seconds(duration_s=0.1)
        assert await a.gather(*(a.compute(work, lambda n=n: piece(n)) for n in range(5))) == [0, 10, 20, 30, 40]
        with pytest.raises(ArithmeticError, match="on the device"):
            await a.compute(work, broken)

    fabric.run(main())
    assert order == [0, 1, 2, 3, 4]


def test_calls_to_a_dead_node_are_unreachable(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    echo(b)

    async def main() -> None:
        await a.call("b", Ping(1), PATIENCE_S)
        fabric.kill("b")
        await a.sleep(0.2)
        with pytest.raises(Unreachable):
            await a.call("b", Ping(2), PATIENCE_S)

    fabric.run(main())


def test_a_node_that_dies_in_mid_call_is_unreachable_and_its_handler_ends(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    reached: list[str] = []

    async def long(source: str, message: Ping) -> Message:
        reached.append("begun")
        await b.sleep(3.0)
        reached.append("ended")
        return Pong(1)

    b.serve({Ping: long})

    async def main() -> None:
        async def killer() -> None:
            while not reached:
                await a.sleep(0.01)
            fabric.kill("b")

        a.spawn(killer())
        with pytest.raises(Unreachable):
            await a.call("b", Ping(1), PATIENCE_S)

    fabric.run(main())
    assert reached == ["begun"]


def test_a_dead_nodes_tasks_stop(fabric: Any) -> None:
    a, b = fabric.node("a"), fabric.node("b")
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(b.now())
            await b.sleep(0.02)

    async def main() -> None:
        b.spawn(beat())
        await a.sleep(0.2)
        fabric.kill("b")
        await a.sleep(0.05)
        count = len(beats)
        assert count >= 2
        await a.sleep(0.3)
        assert len(beats) == count

    fabric.run(main())


def test_chance_depends_on_run_seed_and_node_alone() -> None:
    draws: dict[str, list[float]] = {}
    for kind, make in FABRICS.items():
        fabric = make()
        draws[kind] = [float(fabric.node(name).rng.random()) for name in ("b", "a")]
    assert draws["local"] == draws["http"] == draws["sim"]
    assert draws["local"][0] != draws["local"][1]
