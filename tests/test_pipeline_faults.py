"""A ring that breaks goes on: whatever dies, hangs or comes back, the tokens are those of a ring where nothing did."""

import dataclasses
import json

import numpy as np
import pytest

from refimpl.model.sampler import Sampling
from refimpl.pipeline.messages import Hop
from refimpl.pipeline.requests import OtherRequest, RequestLog
from refimpl.pipeline.stage import StageConfig
from refimpl.world import CallError, Refused, Timeout
from tests.small_ring import SmallRing, ask, make_checkpoint, one_process, prompts_of

LENGTHS, NEW = [3, 17, 9, 6, 12], [20, 14, 23, 9, 18]
FAST = {"overdue_s_min": 3.0, "probe_timeout_s": 0.5, "check_s": 0.1, "spare_wait_s": 0.1, "temperature": 0.9}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(checkpoint):
    return one_process(checkpoint, prompts_of(LENGTHS), NEW, range(5), Sampling(temperature=0.9))[0]


def small_ring(checkpoint, stages, **changes):
    return SmallRing(checkpoint, stages, stage=StageConfig(hop_timeout_s=2.0), **(FAST | changes))


async def tokens(ring, count):
    """Wait until so many tokens have been drawn in all."""
    while sum(len(kept.answer) for kept in ring.head.log.requests.values()) < count:
        await ring.client.sleep(0.002)


def with_fault(ring, fault, timeout_s=90.0):
    """The answers, with `fault(ring)` at work beside."""

    async def main(ring):
        ring.client.spawn(fault(ring), "fault")
        return await ring.client.call("s0", ask(prompts_of(LENGTHS), NEW), timeout_s)

    return [answer.tolist() for answer in ring.run(main).answers]


@pytest.mark.parametrize("seed", range(30))
def test_a_stage_killed_at_any_token_leaves_no_trace(checkpoint, truth, seed):
    """Kill a random stage at a random token, 30 seeded times: token-for-token equal output every time."""
    rng = np.random.default_rng(seed)
    stages, signed = int(rng.integers(2, 5)), bool(seed % 2)
    victim, at = f"s{rng.integers(1, stages)}", int(rng.integers(0, sum(NEW) - 10))
    ring = small_ring(checkpoint, stages, spares=1, signed=signed)

    async def kill(ring):
        await tokens(ring, at)
        ring.fabric.kill(victim)

    assert with_fault(ring, kill) == truth
    assert ring.head.ring.epoch >= 2 and victim not in ring.head.ring.seats
    assert all(len(kept.answer) == len(kept.logprobs) for kept in ring.head.log.requests.values())


def test_two_stages_die_at_once(checkpoint, truth):
    """Both seats go to spares."""
    ring = small_ring(checkpoint, 4, spares=2)

    async def kill(ring):
        await tokens(ring, 30)
        ring.fabric.kill("s1")
        ring.fabric.kill("s3")

    assert with_fault(ring, kill) == truth
    assert set(ring.head.ring.seats) == {"s0", "s2", "s4", "s5"}


def test_a_stage_that_hangs_with_its_socket_open_is_missed_by_its_work(checkpoint, truth):
    """It answers every probe, and computes nothing: found by its counters, named, replaced."""
    ring = small_ring(checkpoint, 3, spares=1)

    async def hang(ring):
        await tokens(ring, 25)
        never = ring.client.signal()

        async def stuck(*arguments):
            await never.wait()

        ring.stages["s2"]._compute = stuck

    assert with_fault(ring, hang) == truth
    said = [blockage.sentence for blockage in ring.head.ring.blockages]
    assert any("stage 's2' has pass" in sentence and "does not finish it" in sentence for sentence in said), said
    assert ring.head.ring.seats == ["s0", "s1", "s3"]


@pytest.mark.parametrize("broken", ["one link", "every link"])
def test_a_hung_run_says_which_link_waits_for_whom(checkpoint, truth, broken):
    """Everybody lives and answers, but what s1 sends does not arrive at s2, or nowhere: the link is named; first its
    receiver is replaced, then, where that did not help, its sender."""
    ring = small_ring(checkpoint, 3, spares=2)

    async def cut(ring):
        await tokens(ring, 25)
        call = ring.worlds["s1"].call

        async def lossy(target, message, timeout_s):
            if isinstance(message, Hop) and (target == "s2" or broken == "every link"):
                await ring.worlds["s1"].sleep(timeout_s)
                raise Timeout("lost on the way")
            return await call(target, message, timeout_s)

        ring.worlds["s1"].call = lossy

    assert with_fault(ring, cut) == truth
    said = [blockage.sentence for blockage in ring.head.ring.blockages]
    assert any("link 's1' -> 's2'" in sentence for sentence in said), said
    seats = ring.head.ring.seats
    assert seats == ["s0", "s1", "s3"] if broken == "one link" else "s1" not in seats


def test_a_stage_that_comes_back_is_used_again(checkpoint, truth):
    """s1 dies, the spare takes its seat; s1 comes back under its name and announces itself; the spare dies, s1 sits
    again. Its old epoch's messages do no harm."""
    ring = small_ring(checkpoint, 2, spares=1)

    async def fault(ring):
        await tokens(ring, 15)
        ring.fabric.kill("s1")
        while ring.head.ring.seats != ["s0", "s2"]:
            await ring.client.sleep(0.01)
        again = ring.start("s1")
        again.serve()
        ring.worlds["s1"].spawn(again.run(), "stage")
        await again.announce("s0")
        await tokens(ring, 40)
        ring.fabric.kill("s2")

    assert with_fault(ring, fault) == truth
    assert ring.head.ring.seats == ["s0", "s1"]


def test_a_stage_that_was_restarted_unseen_is_noticed(checkpoint, truth):
    """It died and came back before anybody looked: its caches are gone, so the ring forms anew, with it."""
    ring = small_ring(checkpoint, 2)

    async def fault(ring):
        await tokens(ring, 20)
        ring.fabric.kill("s1")
        again = ring.start("s1")
        again.serve()
        ring.worlds["s1"].spawn(again.run(), "stage")

    assert with_fault(ring, fault) == truth
    assert ring.head.ring.seats == ["s0", "s1"] and ring.head.ring.epoch >= 2


def test_no_spare_is_waited_for_and_said(checkpoint, truth):
    """With no node left the ring stands, says so, and goes on when one announces itself."""
    ring = small_ring(checkpoint, 2)

    async def fault(ring):
        await tokens(ring, 20)
        ring.fabric.kill("s1")
        while not any(kind == "no spare" for _, kind, _ in ring.records):
            await ring.client.sleep(0.01)
        again = ring.start("s1")
        again.serve()
        ring.worlds["s1"].spawn(again.run(), "stage")
        await again.announce("s0")

    assert with_fault(ring, fault) == truth


def test_the_head_dies_and_its_requests_finish(checkpoint, truth, tmp_path):
    """Requests are durable: a new head on the same record goes on from the last token; a client that asks again with
    the same ids gets everything, and nothing that was generated is generated twice."""
    path = tmp_path / "requests.jsonl"
    ring = small_ring(checkpoint, 3, log=RequestLog(path))

    async def main(ring):
        message = ask(prompts_of(LENGTHS), NEW)

        async def first():
            try:
                await ring.client.call("s0", message, 30)
            except CallError:
                return

        ring.client.spawn(first(), "first try")
        await tokens(ring, 37)
        ring.fabric.kill("s0")
        with path.open("a") as file:  # what a crash in mid-write leaves
            file.write('{"draw":[[0,')
        ring.start("s0")
        ring.new_head(RequestLog(path))
        kept = sum(len(k.answer) for k in ring.head.log.requests.values())
        assert kept >= 37
        ring.head.serve()
        ring.worlds["s0"].spawn(ring.head.run(), "head")
        return await ring.client.call("s0", message, 60)

    done = ring.run(main)
    assert [answer.tolist() for answer in done.answers] == truth
    drawn = [item for line in path.read_text().splitlines() for item in json.loads(line).get("draw", [])]
    assert len(drawn) == sum(NEW), "every token is on the record once"


def test_a_head_goes_on_from_any_cut_of_its_record(checkpoint, tmp_path):
    """Killed after any record, between a last token and its "done" too: the next head starts, and gives the same
    answers, each token on the record once. One request ends at its length, one at a stop token, one with its first."""
    path, prompts, new = tmp_path / "requests.jsonl", prompts_of([3, 9, 5]), [6, 9, 1]
    free = SmallRing(checkpoint, 1, temperature=0.9).answer(prompts, new)[0]
    stop = free[1][4]
    fields = {"temperature": 0.9, "stop_tokens": frozenset({stop})}
    answers, _, reasons = SmallRing(checkpoint, 1, log=RequestLog(path), **fields).answer(prompts, new)
    assert reasons[1] == "stop" and "length" in reasons
    lines = path.read_bytes().splitlines(keepends=True)
    for count in range(len(lines) + 1):
        path.write_bytes(b"".join(lines[:count]))
        said = SmallRing(checkpoint, 1, log=RequestLog(path), **fields).answer(prompts, new)
        assert (said[0], said[2]) == (answers, reasons)
        again = RequestLog(path)
        assert not again.unfinished() and [kept.answer for kept in again.requests.values()] == answers


def test_the_record_survives_any_cut(tmp_path):
    """Cut off at any byte, the record reads back as a prefix of what was written, and can be written on."""
    path = tmp_path / "log"
    log = RequestLog(path)
    log.begin(3)
    log.submit("a", [1, 2], 4, 9)
    log.draw([(0, 5, -0.5), (0, 6, -0.25)])
    log.cut({0: 1})
    log.draw([(0, 7, -1.0)])
    log.done(0, "length")
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        again = RequestLog(path)
        kept = again.requests.get("a")
        assert kept is None or (kept.prompt, kept.seed) == ((1, 2), 9)
        assert kept is None or kept.answer in ([], [5, 6], [5], [5, 7])
        again.submit("b", [3], 1, 0)
        assert RequestLog(path).requests["b"].prompt == (3,)
    path.write_bytes(whole)
    last = RequestLog(path)
    assert last.epoch == 3 and last.requests["a"].answer == [5, 7] and not last.unfinished()


def test_a_record_answers_what_was_asked_and_nothing_else(checkpoint, tmp_path):
    """The same id with another prompt, length or seed, or an id twice in one message: refused, and nothing is changed;
    a head on other terms (temperature, stop tokens, dtype, model) does not start on the record."""
    path = tmp_path / "requests.jsonl"
    answers = SmallRing(checkpoint, 1, log=RequestLog(path)).answer(prompts_of([4]), [5], [9])[0]
    written, (prompt,) = path.read_bytes(), prompts_of([4])
    ring = SmallRing(checkpoint, 1, log=RequestLog(path))

    async def main(ring):
        reasons = []
        for prompts, new, seeds in (
            ([[*prompt[:-1], 60 - prompt[-1]]], [5], [9]),
            ([prompt], [6], [9]),
            ([prompt], [5], [8]),
        ):
            with pytest.raises(Refused) as refused:
                await ring.client.call("s0", ask(prompts, new, seeds), 10)
            reasons.append(refused.value.reason)
        twice = ask([[1], [2]], [3, 3])
        with pytest.raises(Refused, match="expected each once"):
            await ring.client.call("s0", dataclasses.replace(twice, ids=("r7", "r7")), 10)
        again = await ring.client.call("s0", ask([prompt], [5], [9]), 10)
        return reasons, [answer.tolist() for answer in again.answers]

    reasons, again = ring.run(main)
    assert again == answers and [line for line in path.read_bytes().splitlines() if b"submit" in line] == [
        line for line in written.splitlines() if b"submit" in line
    ]
    assert all(f"record {path}: request 'r0' is there with" in reason for reason in reasons)
    assert "prompt (" in reasons[0] and reasons[1].endswith("max_new_tokens 5, now 6 is asked for")
    assert reasons[2].endswith("seed 9, now 8 is asked for")
    for terms in ({"temperature": 0.5}, {"stop_tokens": frozenset({3})}, {"dtype": "bfloat16"}, {"top_p": 0.5}):
        with pytest.raises(OtherRequest, match=f"its answers have {next(iter(terms))} "):
            SmallRing(checkpoint, 1, log=RequestLog(path), **terms)
