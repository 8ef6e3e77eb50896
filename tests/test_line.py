"""What a shaped line costs over real sockets: its latency, both ways, hardly more; and a long message its length."""

import asyncio
import os
import sys
import time

import pytest

from refimpl.messages import Ok
from refimpl.pipeline.messages import Taken
from refimpl.world import Refused
from refimpl.worlds.asyncio_node import Line
from refimpl.worlds.fine_timer import FineTimer
from refimpl.worlds.http import LATENCY_HEADER, HttpFabric
from refimpl.worlds.local import LocalFabric


def spans_s(a: Line, b: Line, sent: Taken, answer: Taken | Exception, calls: int) -> list[tuple[float, float]]:
    """Of each call: from its beginning to the handler, and from there back."""
    fabric = HttpFabric()
    caller, callee = fabric.node("a", a), fabric.node("b", b)
    came_s: list[float] = []

    async def handler(source, message):
        came_s.append(time.monotonic())
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main():
        callee.serve({Taken: handler})
        spans = []
        for _ in range(calls):
            began_s = time.monotonic()
            try:
                await caller.call("b", sent, 10)
            except Refused as refused:
                assert refused.reason == "no"
            spans.append((came_s[-1] - began_s, time.monotonic() - came_s[-1]))
        return spans

    return fabric.run(main())


@pytest.mark.parametrize("answer", [Taken(bytes(40)), Refused("no")])
def test_each_way_takes_the_latency_of_both_lines(answer):
    """A request, its answer and a refusal: never less than 7 + 12 ms, and at best hardly more."""
    spans = spans_s(Line(latency_ms=7), Line(latency_ms=12), Taken(bytes(40)), answer, 15)
    assert min(min(pair) for pair in spans) >= 0.019
    for way in (0, 1):
        assert min(pair[way] for pair in spans) < 0.019 + 0.005


def test_a_long_message_takes_its_length_and_the_latency():
    """100 kB at 8 Mbit/s are 100 ms, on top of 30 ms; the short answer only the 30."""
    spans = spans_s(Line(uplink_mbit_s=8, latency_ms=30), Line(), Taken(bytes(100_000)), Taken(b"yes"), 3)
    assert all(there_s >= 0.129 and back_s >= 0.030 for there_s, back_s in spans)
    assert min(there_s for there_s, _ in spans) < 0.145
    assert min(back_s for _, back_s in spans) < 0.036


@pytest.mark.parametrize("world", [HttpFabric, LocalFabric])
def test_messages_on_one_line_take_turns_by_packets(world):
    """At 4 Mbit/s 40 kB take 80 ms; a packet that is sent meanwhile is there long before them. Neither wakes late at
    the cost of the line's rate: over sockets as in one process, both are there after 82 ms and little more."""
    fabric = world()
    caller, callee = fabric.node("a", Line(uplink_mbit_s=4)), fabric.node("b")
    came: list[tuple[int, float]] = []

    async def handler(source, message):
        came.append((len(message.signature), time.monotonic()))
        return Ok()

    async def main():
        callee.serve({Taken: handler})
        began_s = time.monotonic()
        await caller.gather(caller.call("b", Taken(bytes(40_000)), 10), caller.call("b", Taken(bytes(1000)), 10))
        return [(size, at_s - began_s) for size, at_s in came]

    (first, first_s), (second, second_s) = fabric.run(main())
    assert (first, second) == (1000, 40_000) and 0.08 <= second_s < 0.12 and first_s < second_s / 2


def test_waits_end_in_their_order_and_never_early():
    """Thirteen waits asked for at once, in any order; one that nobody waits for any more holds up none."""

    async def main():
        timer, began_s, ended = FineTimer(), time.monotonic(), []

        async def wait(after_s):
            await timer.until(began_s + after_s)
            ended.append((after_s, time.monotonic() - began_s))

        given_up = asyncio.ensure_future(wait(0.0005))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(*(wait((7 * at % 13) * 0.003 + 0.001) for at in range(13)))
        timer.close()
        return ended

    ended = asyncio.run(main())
    assert [after_s for after_s, _ in ended] == sorted(after_s for after_s, _ in ended) and len(ended) == 13
    assert all(after_s <= at_s for after_s, at_s in ended)
    assert min(at_s - after_s for after_s, at_s in ended) < 0.001


def test_without_a_fine_timer_waits_are_the_event_loops(monkeypatch):
    """Where the kernel has none: never early, and no file is opened."""
    monkeypatch.setattr("refimpl.worlds.fine_timer._create", None)

    async def main():
        timer, began_s = FineTimer(), time.monotonic()
        await asyncio.gather(*(timer.until(began_s + after_s) for after_s in (0.011, 0.003)))
        took_s, file = time.monotonic() - began_s, timer._file
        timer.close()
        return took_s, file

    took_s, file = asyncio.run(main())
    assert 0.011 <= took_s < 0.1 and file == -1


def test_a_closed_timer_cancels_its_waits_and_takes_no_more():
    """Its file is closed, once; what is past needs no timer."""

    async def main():
        timer = FineTimer()
        waiting = asyncio.ensure_future(timer.until(time.monotonic() + 60))
        await asyncio.sleep(0)
        file = timer._file
        timer.close()
        timer.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(asyncio.CancelledError):
            await timer.until(time.monotonic() + 60)
        await timer.until(time.monotonic())
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="a timer file is Linux's")
def test_a_timer_that_the_kernel_refuses_is_an_error_and_no_endless_wait(monkeypatch):
    monkeypatch.setattr("refimpl.worlds.fine_timer._set", lambda *arguments: -1)

    async def main():
        timer = FineTimer()
        with pytest.raises(OSError, match="timerfd_settime"):
            await asyncio.wait_for(timer.until(time.monotonic() + 0.01), 5)
        timer.close()

    asyncio.run(main())


def test_a_node_makes_no_timer_for_what_is_past_nor_once_it_is_stopped():
    fabric = HttpFabric()
    node = fabric.node("a")

    async def main():
        await node.sleep_until(node.elapsed_s())
        assert node._timer is None
        await node.stop()
        with pytest.raises(asyncio.CancelledError):
            await node.sleep_until(node.elapsed_s() + 1)
        assert node._timer is None

    fabric.run(main())


async def ok(source, message):
    return Ok()


@pytest.mark.parametrize("liar", ["a", "b"])
@pytest.mark.parametrize("said", ["nan", "-1", "soon"])
def test_a_latency_that_cannot_be_is_refused(liar, said):
    """On lines that are shaped, whether the caller says it or the callee."""
    fabric = HttpFabric()
    caller, callee = fabric.node("a", Line(latency_ms=1)), fabric.node("b", Line(latency_ms=1))
    fabric.nodes[liar]._headers = lambda *, text=False: {LATENCY_HEADER: said}

    async def main():
        callee.serve({Taken: ok})
        with pytest.raises(Refused, match=f"header {LATENCY_HEADER} is '{said}', expected milliseconds, 0 or more"):
            await caller.call("b", Taken(b""), 5)

    fabric.run(main())


@pytest.mark.parametrize("liar", ["a", "b"])
@pytest.mark.parametrize(("latency_ms", "said"), [(0, "50000"), (0, "nan"), (3, "50000")])
def test_nobody_makes_a_node_hold_what_it_has(liar, latency_ms, said):
    """Without an emulation the header is ignored; within one it counts up to the slowest of its lines."""
    fabric = HttpFabric()
    line = Line(latency_ms=latency_ms)
    caller, callee = fabric.node("a", line), fabric.node("b", line)
    fabric.nodes[liar]._headers = lambda *, text=False: {LATENCY_HEADER: said}

    async def main():
        callee.serve({Taken: ok})
        began_s = time.monotonic()
        await caller.call("b", Taken(b""), 5)
        return time.monotonic() - began_s

    took_s = fabric.run(main())
    assert 3 * latency_ms / 1000 <= took_s < 1.0
