"""Messages made to break a ring: each is refused with a sentence before anything has changed, and the ring goes on."""

import dataclasses

import numpy as np
import pytest

from refimpl.identity import Identity
from refimpl.model.sampler import Sampling
from refimpl.pipeline.messages import Announce, Complete, Drawn, JoinRing, Member
from refimpl.pipeline.requests import RequestLog
from refimpl.pipeline.stage import StageConfig
from refimpl.world import Refused
from tests.small_ring import VOCABULARY, SmallRing, ask, make_checkpoint, one_process, prompts_of

FAST = {"overdue_s_min": 0.4, "probe_timeout_s": 0.2, "check_s": 0.05, "spare_wait_s": 0.1, "temperature": 0.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


async def refusal(node, target, message):
    """The reason why `target` refuses."""
    with pytest.raises(Refused) as refused:
        await node.call(target, message, 10)
    return refused.value.reason


# ------------------------------------------------------------------------------------------------------ clients
def test_a_prompt_with_a_token_that_the_model_does_not_know_gets_no_further(checkpoint, tmp_path):
    """Too large, negative, no whole number, not in a row: refused, not on the record, and the head answers others."""
    path = tmp_path / "requests.jsonl"
    ring = SmallRing(checkpoint, 2, log=RequestLog(path), temperature=0.0)
    prompts = prompts_of([4, 6])

    async def main(ring):
        reasons = []
        for bad in (np.array([1, VOCABULARY]), np.array([-1]), np.array([1.0]), np.ones((1, 2), np.int32)):
            message = Complete(("bad", "good"), (bad, np.array([3], np.int32)), (2, 2), (0, 0))
            reasons.append(await refusal(ring.client, "s0", message))
        done = await ring.client.call("s0", ask(prompts, [8, 8]), 30)
        return reasons, [answer.tolist() for answer in done.answers]

    reasons, answers = ring.run(main)
    assert reasons == [
        "prompt of request 'bad': token 61, expected 0 to 60",
        "prompt of request 'bad': token -1, expected 0 to 60",
        "prompt of request 'bad' is float64 (1,), expected one row of whole numbers",
        "prompt of request 'bad' is int32 (1, 2), expected one row of whole numbers",
    ]
    assert answers == one_process(checkpoint, prompts, [8, 8], [0, 1], Sampling(temperature=0))[0]
    assert set(RequestLog(path).requests) == {"r0", "r1"}


# --------------------------------------------------------------------------------------------------- the last stage
WRONG = {
    "beyond the vocabulary": lambda d: {"tokens": d.tokens + VOCABULARY},
    "negative": lambda d: {"tokens": d.tokens - VOCABULARY},
    "no whole numbers": lambda d: {"tokens": d.tokens.astype(np.float32)},
    "no row": lambda d: {"tokens": d.tokens[None], "logprobs": d.logprobs[None]},
    "too few log-probabilities": lambda d: {"logprobs": d.logprobs[1:]},
    "log-probabilities of no size": lambda d: {"logprobs": d.logprobs * np.nan},
    "too many tokens": lambda d: {"tokens": np.tile(d.tokens, 2), "logprobs": np.tile(d.logprobs, 2)},
}


@pytest.mark.parametrize(
    ("wrong", "signed"), [*((wrong, False) for wrong in WRONG), ("negative", True), ("too few log-probabilities", True)]
)
def test_a_last_stage_that_answers_nonsense_loses_its_seat(checkpoint, wrong, signed):
    """From its third pass on it sends what is no token, or has no log-probability: nothing of it is kept, its seat
    goes to the spare, and the answers are those of one process."""
    ring = SmallRing(checkpoint, 2, spares=1, stage=StageConfig(hop_timeout_s=2.0), signed=signed, **FAST)
    prompts, new = prompts_of([4, 6]), [7, 5]
    call, sent = ring.worlds["s1"].call, []

    async def lying(target, message, timeout_s):
        if isinstance(message, Drawn):
            sent.append(message.number)
            if len(sent) > 2 and len(message.tokens):
                message = dataclasses.replace(message, **WRONG[wrong](message))
        return await call(target, message, timeout_s)

    ring.worlds["s1"].call = lying
    answers, logprobs, _ = ring.answer(prompts, new)
    assert answers == one_process(checkpoint, prompts, new, [0, 1], Sampling(temperature=0))[0]
    assert [len(row) for row in logprobs] == new and np.isfinite(np.concatenate(logprobs)).all()
    assert ring.head.ring.seats == ["s0", "s2"] and len(sent) > 2


# ------------------------------------------------------------------------------------------------- plans of a ring
def plan_of(small, head="client", **fields):
    """A whole plan over `head` and s1."""
    plan = small.head.ring.plan(small.names[:2], 8)
    first = Member(name=head, public_key=plan.members[0].public_key, first=0, end=plan.members[0].end)
    return dataclasses.replace(plan, members=(first, plan.members[1]), **({"ring": "another", "epoch": 9} | fields))


IMPOSSIBLE = {
    "rows": (0, -3, 1 << 40),
    "capacity_tokens": (1, -(1 << 62), 1 << 50),
    "micro_batches": (0, 1 << 31),
    "hidden": (-1, 1 << 60),
    "window": (0, -1),
    "chunk_tokens": (0, -8),
    "top_k": (0, -1, 1 << 62),
    "sampling_top_k": (-1,),
}


def test_a_plan_that_asks_for_the_impossible_is_refused_before_anything_is_loaded(checkpoint):
    """Negative, none, or more than a machine has: a sentence with field and bounds, no allocation, no failure. What is
    possible but too large for this node is refused by its size, from the configuration alone."""
    ring = SmallRing(checkpoint, 2, stage=StageConfig(memory_bytes=1 << 20), signed=True)
    stage, loads = ring.stages["s1"], []
    stage.parts = dataclasses.replace(stage.parts, load=lambda plan, member: loads.append(plan))

    async def main():
        stage.serve()
        for field, values in IMPOSSIBLE.items():
            for value in values:
                reason = await refusal(ring.client, "s1", JoinRing(plan_of(ring, **{field: value})))
                assert f"{field} is {value}, expected" in reason
        for fields in ({"sampling_temperature": -1.0}, {"sampling_top_p": 0.0}):
            assert "expected 0 or more, and" in await refusal(ring.client, "s1", JoinRing(plan_of(ring, **fields)))
        large = JoinRing(plan_of(ring, rows=1 << 12, capacity_tokens=1 << 20))
        assert "s1' has 1048576: " in await refusal(ring.client, "s1", large)

    ring.fabric.run(main())
    assert not loads and stage.formation is None and not ring.fabric.failures


def test_the_size_known_before_loading_is_nearly_that_after(checkpoint):
    """Only norms and biases are left out."""
    ring = SmallRing(checkpoint, 3)
    plan, parts = ring.head.ring.plan(ring.names[:3], 8), ring.stages["s1"].parts
    for member in plan.members:
        true, before = parts.load(plan, member).memory_bytes, parts.bytes_min(plan, member)
        assert 0.95 * true < before <= true


def test_no_room_is_a_refusal_whatever_the_library_calls_it(checkpoint):
    """What the loader raises for want of memory reaches the head as a reason, and no supervisor."""
    ring = SmallRing(checkpoint, 2)
    stage = ring.stages["s1"]

    def load(plan, member):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    stage.parts = dataclasses.replace(stage.parts, load=load)

    async def main():
        stage.serve()
        return await refusal(ring.client, "s1", JoinRing(plan_of(ring)))

    assert "cannot load layers 3..6: [enforce fail" in ring.fabric.run(main())
    assert not ring.fabric.failures


def test_a_ring_that_works_is_not_halted_by_a_stranger(checkpoint):
    """Another ring's plan, a plan in the head's name, a later epoch: refused, and the same formation goes on."""
    ring = SmallRing(checkpoint, 2, temperature=0.0)
    prompts = prompts_of([4, 6])

    async def main(ring):
        while not ring.head.ring.up:
            await ring.client.sleep(0.02)
        before = ring.stages["s1"].formation
        reasons = [
            await refusal(ring.client, "s1", JoinRing(plan_of(ring, **fields)))
            for fields in ({}, {"ring": "test"}, {"head": "s0"}, {"ring": "test", "head": "s0"})
        ]
        done = await ring.client.call("s0", ask(prompts, [8, 8]), 30)
        assert ring.stages["s1"].formation is before and not before.halted
        return reasons, [answer.tolist() for answer in done.answers]

    reasons, answers = ring.run(main)
    assert all("'s1' is in ring 'test', and heard of its head 's0'" in reason for reason in reasons[:2]), reasons
    assert reasons[2:] == ["'client' is not the head of this plan, 's0' is"] * 2
    assert answers == one_process(checkpoint, prompts, [8, 8], [0, 1], Sampling(temperature=0))[0]
    assert ring.head.ring.epoch == 1


def test_a_stage_whose_head_is_gone_can_serve_another(checkpoint):
    """After `silence_s` without a word from head or predecessor, whoever forms a ring may have it."""
    ring = SmallRing(checkpoint, 2, stage=StageConfig(silence_s=0.2))

    async def main():
        ring.stages["s1"].serve()
        await ring.worlds["s0"].call("s1", JoinRing(plan_of(ring, head="s0", ring="test")), 20)
        assert "heard of its head" in await refusal(ring.client, "s1", JoinRing(plan_of(ring)))
        await ring.client.sleep(0.25)
        await ring.client.call("s1", JoinRing(plan_of(ring)), 20)
        assert ring.stages["s1"].formation.plan.ring == "another"

    ring.fabric.run(main())


# ------------------------------------------------------------------------------------------------- nodes that come
def test_a_seat_is_for_who_was_named_and_not_for_who_was_removed(checkpoint, tmp_path):
    """A removed node comes back under its name, under another, and to the next head on the record; a known key takes
    another name, a known name another key, a stranger comes: refused, each with its reason, and no node is added."""
    path, fresh = tmp_path / "record", Identity.from_seed(2, "fresh").public_key

    def announced(strangers, log):
        ring = SmallRing(checkpoint, 2, spares=1, log=log, strangers=strangers)
        ring.head.remove("s1")

        async def main():
            ring.head.serve()
            asked = [
                ("s1", ring.nodes["s1"], 2),
                ("s1", fresh, 2),
                ("s1-again", ring.nodes["s1"], 2),
                ("s2-again", ring.nodes["s2"], 2),
                ("s2", fresh, 2),
                ("s2", ring.nodes["s2"], 1),
                ("s3", "no key", 2),
                ("s3", fresh, 2),
                ("s4", Identity.from_seed(2, "s4").public_key, 2),
                ("s2", ring.nodes["s2"], 2),
            ]
            reasons = []
            for name, key, version in asked:
                node = ring.fabric.nodes.get(name) or ring.fabric.node(name)
                try:
                    await node.call("s0", Announce(key, version), 10)
                    reasons.append("")
                except Refused as refused:
                    reasons.append(refused.reason)
            return reasons

        return ring.fabric.run(main()), ring.head.ring

    banned = ["node 's1' is banned here"] * 2 + ["node 's1-again' is banned here"]
    known = ["node 's2' is known under another key", "version is 1, expected 2"]
    reasons, _ = announced(False, None)
    unnamed = [f"node {n!r} is none of those that this ring was started with" for n in ("s2-again", "s3", "s3", "s4")]
    assert reasons == [*banned, unnamed[0], *known, *unnamed[1:], ""]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("refimpl.pipeline.ring.NODES_MAX", 4)
        reasons, ring = announced(True, RequestLog(path))
    twice = "the key of node 's2-again' is that of a node with another name"
    assert reasons == [*banned, twice, *known, "'no key' is no public key", "", "there are 4 nodes already", ""]
    assert list(ring.nodes) == ["s0", "s1", "s2", "s3"] and ring.nodes["s3"] == fresh
    assert ring._seated() == ["s0", "s2"]
    later = SmallRing(checkpoint, 2, spares=1, log=RequestLog(path)).head.ring
    assert later.banned == ["s1"] and later._seated() == ["s0", "s2"]


def test_one_key_has_one_seat(checkpoint):
    """A head is not started with two names of one key, and no stage joins such a ring: a verdict names a key."""
    ring = SmallRing(checkpoint, 2)
    plan = ring.head.ring.plan(["s0", "s1"], 8)
    double = tuple(dataclasses.replace(member, public_key="0" * 64) for member in plan.members)
    assert dataclasses.replace(plan, members=double).faults() == "a public key is named twice" and not plan.faults()
    ring.nodes["s1"] = ring.nodes["s0"]
    with pytest.raises(ValueError, match="have one public key"):
        ring.new_head()
