"""A ring of N stages is one process: same tokens, same logits, whatever the cut, the lengths, the ends and refills."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from refimpl.messages import size_bytes
from refimpl.model.sampler import Sampling, sample
from refimpl.model.weights import content_hash, load_decoder
from refimpl.pipeline.compute import StageCompute, likeliest, torch_parts
from refimpl.pipeline.messages import Greeting, Hop, JoinRing, hop_of, pass_of
from refimpl.pipeline.schedule import HeadSchedule, Pass, PassRow, Request, StageRows
from refimpl.pipeline.stage import StageConfig
from refimpl.world import Refused
from refimpl.worlds.asyncio_node import Line
from tests.small_ring import CUTS, HIDDEN, VOCABULARY, SmallRing, ask, make_checkpoint, one_process, prompts_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


LENGTHS = [3, 17, 1, 9, 6, 30, 2, 12, 5]
NEW = [9, 3, 20, 1, 14, 6, 25, 2, 11]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_n_stages_are_one_process(checkpoint, stages, temperature):
    """Same tokens (greedy and seeded), log-probabilities within 1e-4 in float32: uneven stages, ragged prompts, some
    longer than a chunk, ends at different steps, nine requests through six rows (refills), then empty refills."""
    prompts, seeds = prompts_of(LENGTHS), [100 + i for i in range(len(NEW))]
    sampling = Sampling(temperature=temperature, top_p=0.95)
    ring = SmallRing(checkpoint, stages, temperature=temperature, top_p=0.95)
    answers, logprobs, reasons = ring.answer(prompts, NEW, seeds)
    true, true_logprobs = one_process(checkpoint, prompts, NEW, seeds, sampling)
    assert answers == true and reasons == ["length"] * len(NEW)
    pairs = [pair for both in zip(logprobs, true_logprobs, strict=True) for pair in zip(*both, strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    assert worst < 1e-4
    assert not ring.head.schedule.answers() and not ring.head.ring.blockages


def test_the_likeliest_token_is_what_the_sampler_takes():
    """At temperature 0 no sampler is loaded; tokens are equal, ties too, and log-probabilities within rounding."""
    logits = torch.randn(13, 61, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    zeros = torch.zeros(13, dtype=torch.int64)
    tokens, logprobs = likeliest(logits)
    true, true_logprobs = sample(logits, zeros, zeros, Sampling(temperature=0))
    assert tokens.equal(true) and (logprobs - true_logprobs).abs().max() < 1e-5
    with pytest.raises(ValueError, match="NaN"):
        likeliest(torch.full((1, 3), float("nan")))


@pytest.mark.parametrize("stages", [2, 3])
def test_logits_are_those_of_one_process(checkpoint, stages):
    """Within 1e-4 in float32, position by position, through chunked prefill and decode over the wire's own arrays."""
    ranges = [range(a, b) for a, b in itertools.pairwise((0, *CUTS[stages]))]
    parts = [load_decoder(checkpoint, layers=r, dtype=torch.float32, device="cpu") for r in ranges]
    sizes = {"micro_batches": 1, "rows": 3, "capacity_tokens": 64}
    computes = [StageCompute(part, sampling=Sampling(temperature=0), **sizes) for part in parts]
    held = [StageRows(**sizes) for _ in parts]
    schedule = HeadSchedule(chunk_tokens=5, **sizes)
    prompts = prompts_of([11, 3, 7])
    for i, prompt in enumerate(prompts):
        schedule.submit(Request(id=i, prompt=tuple(prompt), max_new_tokens=6))
    logits = {i: [] for i in range(3)}
    while (made := schedule.next_pass()) is not None:
        states = None
        for compute, rows in zip(computes, held, strict=True):
            header = made if states is None else pass_of(hop_of(made, states))
            result = compute.run(header, rows.obey(header), states)
            states = result.states
        drawn = torch.from_numpy(result.states.copy())
        lasts = np.cumsum([row.new for row in made.rows]) - 1
        for row, last in zip(made.rows, lasts, strict=True):
            if row.draws:
                logits[row.request].append(parts[-1].logits(drawn[last]))
        schedule.returned(0, made.number, [] if result.tokens is None else result.tokens.tolist())
    whole = load_decoder(checkpoint, dtype=torch.float32, device="cpu")
    for i, prompt in enumerate(prompts):
        text = list(prompt)
        for ours in logits[i]:
            theirs = whole.logits(whole(torch.tensor([text])))[0, -1]
            assert (ours - theirs).abs().max() < 1e-4
            text.append(int(theirs.argmax()))
        assert len(logits[i]) == 6


@pytest.mark.parametrize(("rows", "signed", "beside"), [(1, False, 175), (1, True, 239), (24, True, 423)])
def test_what_a_hop_costs_beside_its_tensor(rows, signed, beside):
    """A frame of 167 bytes, 8 for each row, 64 for the signature."""
    made = Pass(1, 5, 0, 0, tuple(PassRow(at, 40, 1, True, 3, 7) for at in range(rows)))
    hop = hop_of(made, np.zeros((rows, 576), np.uint16), (), bytes(64 * signed))
    assert size_bytes(hop) - rows * 576 * 2 == beside


def test_bfloat16_travels_bit_for_bit(checkpoint):
    """What arrives is what was sent: a ring of three in bfloat16 gives the tokens of a ring of one."""
    prompts, new = prompts_of([4, 9, 2, 7]), [12, 5, 16, 8]
    results = [
        SmallRing(checkpoint, stages, dtype="bfloat16", temperature=0.7).answer(prompts, new)[0] for stages in (1, 3)
    ]
    assert results[0] == results[1]


def test_sequences_stop_at_their_stop_tokens(checkpoint):
    """A drawn stop token ends its sequence, and is part of the answer; rows that free up are refilled."""
    stop = frozenset(range(0, VOCABULARY, 7))
    prompts, new = prompts_of(LENGTHS), [20] * len(LENGTHS)
    ring = SmallRing(checkpoint, 3, stop_tokens=stop, temperature=1.0)
    answers, _, reasons = ring.answer(prompts, new)
    true, _ = one_process(checkpoint, prompts, new, range(len(new)), Sampling(temperature=1.0), stop)
    assert answers == true and set(reasons) == {"stop", "length"}


@pytest.mark.parametrize("signed", [False, True])
def test_slow_links_and_many_in_flight_change_nothing(checkpoint, signed):
    """15 ms a hop, four micro-batches, messages that overtake: the same tokens, with and without signatures."""
    prompts, new, seeds = prompts_of(LENGTHS), NEW, list(range(9))
    ring = SmallRing(checkpoint, 3, line=Line(latency_ms=7.5), micro_batches=4, rows=2, signed=signed, temperature=0.8)
    answers, _, _ = ring.answer(prompts, new, seeds)
    assert answers == one_process(checkpoint, prompts, new, seeds, Sampling(temperature=0.8))[0]
    assert not ring.head.verdicts and not ring.head.ring.blockages


# ------------------------------------------------------------------------------------------------ refused before work
def test_a_request_that_exceeds_the_cache_is_refused_before_work(checkpoint):
    """Prompt = capacity + 1, and no token is drawn for the others of the same message."""
    ring = SmallRing(checkpoint, 2, capacity_tokens=20)
    with pytest.raises(Refused, match="needs room for 21 tokens .* a row has 20"):
        ring.answer(prompts_of([3, 21]), [4, 1])
    assert not ring.head.log.requests and ring.head.schedule.number == 0


def test_a_request_is_answered_once_and_told_as_often_as_asked(checkpoint):
    """Said again with the same id, it is not done again."""
    ring = SmallRing(checkpoint, 2)
    message = ask(prompts_of([3, 5]), [4, 4])

    async def main(ring):
        first = await ring.client.call("s0", message, 30)
        passes = ring.head.schedule.number
        second = await ring.client.call("s0", message, 30)
        return first, second, ring.head.schedule.number - passes

    first, second, more = ring.run(main)
    assert [a.tolist() for a in first.answers] == [a.tolist() for a in second.answers] and more == 0


# -------------------------------------------------------------------------------------------------------- handshake
def joined(ring, change):
    """Let s1 join a plan that was changed."""

    async def main(ring):
        plan = ring.head.ring.plan(ring.names[: len(ring.config.cuts)], 8)
        return await ring.worlds["s0"].call("s1", JoinRing(change(plan)), 20)

    async def body():
        ring.stages["s1"].serve()
        return await main(ring)

    return ring.fabric.run(body())


def with_member(plan, **fields):
    members = list(plan.members)
    members[1] = dataclasses.replace(members[1], **fields)
    return dataclasses.replace(plan, members=tuple(members))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: dataclasses.replace(p, checkpoint="f" * 64), "checkpoint: the plan says ffff"),
        (lambda p: dataclasses.replace(p, version=99), "version: the plan says 99, stage 's1' has 2"),
        (lambda p: dataclasses.replace(p, dtype="bfloat16"), "dtype: the plan says bfloat16, stage 's1' has float32"),
        (lambda p: dataclasses.replace(p, hidden=32), "hidden: the plan says 32, the checkpoint 24"),
        (lambda p: with_member(p, first=2), "stage 1 holds layers 2..6, expected from 3 on"),
        (lambda p: with_member(p, end=6), "the stages end at layer 6 of 7"),
        (lambda p: with_member(p, public_key="0" * 64), "public_key"),
        (lambda p: with_member(p, name="other"), "no member"),
    ],
)
def test_the_handshake_refuses_what_does_not_fit(checkpoint, change, says):
    """Model hash, layer range, shape, dtype, version: before the first token, with both values."""
    with pytest.raises(Refused, match=says):
        joined(SmallRing(checkpoint, 2), change)


def test_a_stage_too_large_for_its_node_is_refused(checkpoint):
    ring = SmallRing(checkpoint, 2, stage=StageConfig(memory_bytes=1000))
    with pytest.raises(Refused, match="take .* bytes, stage 's1' has 1000: .* bytes short"):
        joined(ring, lambda plan: plan)


def test_neighbours_that_do_not_fit_are_named_before_the_first_token(checkpoint):
    """A predecessor whose layers end elsewhere, or that is a stranger, is refused by its successor."""
    ring = SmallRing(checkpoint, 3)

    async def main(ring):
        while not ring.head.ring.up:
            await ring.client.sleep(0.02)
        plan = ring.stages["s1"].formation.plan
        right = Greeting(plan.ring, plan.epoch, plan.version, plan.checkpoint, 1, plan.hidden, "float32")
        reasons = []
        for world, change in (("client", {}), ("s0", {"end": 2}), ("s0", {"dtype": "bfloat16"}), ("s0", {"epoch": 9})):
            node = ring.client if world == "client" else ring.worlds[world]
            try:
                await node.call("s1", dataclasses.replace(right, **change), 5)
            except Refused as refusal:
                reasons.append(refusal.reason)
        await ring.worlds["s0"].call("s1", right, 5)
        return reasons

    reasons = ring.run(main)
    assert len(reasons) == 4
    for reason, part in zip(reasons, ("sender", "first layer", "dtype", "epoch 9"), strict=True):
        assert part in reason


def test_strangers_and_old_epochs_are_refused_and_the_ring_goes_on(checkpoint):
    """Hops from a stranger, of another epoch, of another width, or far ahead: refused with a reason, no harm done."""
    ring = SmallRing(checkpoint, 2, signed=True)
    prompts, new = prompts_of([4, 6]), [10, 10]

    async def main(ring):
        while not ring.head.ring.up:
            await ring.client.sleep(0.02)
        none = np.zeros(0, np.int32)
        one = np.ones(1, np.int32)
        fine = Hop(1, 0, 0, 0, one, 0 * one, none, np.zeros(0, np.uint8), np.zeros((1, 2), np.int64), none,
                   none.reshape(0, 2), np.zeros((1, HIDDEN), np.float32))  # fmt: skip
        reasons = []
        for node, change in (
            (ring.client, {}),
            (ring.worlds["s0"], {"epoch": 0}),
            (ring.worlds["s0"], {"epoch": 7}),
            (ring.worlds["s0"], {"states": np.zeros((1, HIDDEN + 1), np.float32)}),
            (ring.worlds["s0"], {"states": np.zeros((2, HIDDEN), np.float32)}),
            (ring.worlds["s0"], {"past": -one}),
            (ring.worlds["s0"], {"signature": b"1" * 64}),
        ):
            try:
                await node.call("s1", dataclasses.replace(fine, **change), 5)
            except Refused as refusal:
                reasons.append(refusal.reason)
        done = await ring.client.call("s0", ask(prompts, new), 30)
        return reasons, [a.tolist() for a in done.answers]

    reasons, answers = ring.run(main)
    says = ["not the predecessor", "epoch 1", "epoch 7", "expected float32 of 24", "counts 1", "starts", "signature"]
    assert len(reasons) == 7 and all(part in reason for reason, part in zip(reasons, says, strict=True)), reasons
    assert answers == one_process(checkpoint, prompts, new, [0, 1], Sampling(temperature=1.0))[0]


def test_a_stage_reads_only_its_own_layers(checkpoint):
    """Weights held are those of the layer range; the embedding and the head lie on the ends."""
    parts = torch_parts(checkpoint, dtype="float32", device="cpu")
    ring = SmallRing(checkpoint, 3)
    ring.head.ring.epoch = 1
    plan = ring.head.ring.plan(["s0", "s1", "s2"], 8)
    loaded = [parts.load(plan, member) for member in plan.members]
    assert [len(c.decoder.layers) for c in loaded] == [1, 4, 2]
    assert [(c.decoder.embedding is not None, c.decoder.head is not None) for c in loaded] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert parts.checkpoint == content_hash(checkpoint)
