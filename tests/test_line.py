"""What a shaped line costs over real sockets: its latency, both ways, hardly more; and a long message its length."""

import asyncio
import time

import pytest

from refimpl.messages import Ok
from refimpl.pipeline.messages import Taken
from refimpl.world import Refused
from refimpl.worlds.asyncio_node import Line
from refimpl.worlds.fine_timer import FineTimer
from refimpl.worlds.http import HttpFabric


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


def test_messages_on_one_line_take_turns_by_packets():
    """At 4 Mbit/s 40 kB take 80 ms; a packet that is sent meanwhile is there long before them."""
    fabric = HttpFabric()
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
    assert (first, second) == (1000, 40_000) and second_s >= 0.08 and first_s < second_s / 2


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


def test_a_latency_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(
        "refimpl.worlds.http.HttpWorld._headers", lambda self, *, text=False: {"X-Armillary-Latency-Ms": "nan"}
    )
    fabric = HttpFabric()
    caller, callee = fabric.node("a"), fabric.node("b")

    async def handler(source, message):
        return Ok()

    async def main():
        callee.serve({Taken: handler})
        with pytest.raises(Refused, match="header X-Armillary-Latency-Ms is 'nan', expected 0 to 60000"):
            await caller.call("b", Taken(b""), 5)

    fabric.run(main())
