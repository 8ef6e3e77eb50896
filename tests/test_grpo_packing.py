"""Packed equals unpacked, in log-probabilities and gradients; no sample sees another; none is trained twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refimpl.grpo.logprob import head_logprobs
from refimpl.grpo.loss import LossConfig, Normaliser, grpo_loss
from refimpl.grpo.packing import (
    PADDING,
    PackedBatch,
    TrainSample,
    _rows_of_blocks,
    answer_length,
    cut,
    first_fit,
    pack,
    plan_rows,
    row_length,
    share_rows,
)
from refimpl.model.config import FAMILIES, Family, ModelConfig
from refimpl.model.transformer import Decoder
from refimpl.model.weights import random_decoder


def sample(prompt: int, answer: int, seed: int = 0) -> TrainSample:
    rng = np.random.default_rng([seed, prompt, answer])
    return TrainSample(
        prompt=rng.integers(1, 31, prompt).astype(np.int32),
        answer=rng.integers(1, 31, answer).astype(np.int32),
        behaviour=(-3.4 + 0.1 * rng.standard_normal(answer)).astype(np.float32),
        advantage=float(rng.normal()),
    )


# --- where samples go -------------------------------------------------------------------------------------------------


def test_first_fit_longest_first() -> None:
    """Capacity 10: 7 opens a row, 6 another, 4 fits the second, 3 the first, 3 neither."""
    assert first_fit([3, 7, 4, 6, 3], 10) == [[1, 0], [3, 2], [4]]
    assert first_fit([], 10) == []
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        first_fit([3, 11], 10)


@settings(deadline=None)
@given(st.lists(st.integers(1, 17), max_size=60))
def test_every_sample_is_in_one_row(lengths: list[int]) -> None:
    """Each once, no row over capacity, and no two rows that would fit into one."""
    rows = first_fit(lengths, 17)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    used = sorted(sum(lengths[index] for index in row) for row in rows)
    assert all(0 < tokens <= 17 for tokens in used)
    assert len(used) < 2 or used[0] + used[1] > 17
    assert rows == first_fit(lengths, 17)


@settings(deadline=None)
@given(st.lists(st.integers(1, 17), max_size=60), st.integers(1, 5))
def test_ranks_run_in_step_and_train_nothing_twice(lengths: list[int], ranks: int) -> None:
    """The original duplicates a rank's first row where rows are missing; here they are filled with nothing."""
    rows = first_fit(lengths, 17)
    shares = share_rows(rows, lengths, ranks)
    assert len(shares) == ranks and len({len(share) for share in shares}) == 1
    assert sorted(index for share in shares for row in share for index in row) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for row in share for index in row) for share in shares]
    if len(rows) % ranks == 0 and rows:
        assert max(tokens) - min(tokens) <= 17


def test_an_empty_row_trains_nothing() -> None:
    batch = pack([sample(2, 3)], [[0], []])
    assert batch.totals().tokens == 3 and batch.totals().sequences == 1 and batch.totals().cells == 10
    assert (batch.segment_BT[1] == PADDING).all() and batch.scored_N.max() < 5
    assert pack([], [[]]).totals().tokens == 0


# --- what a row holds -------------------------------------------------------------------------------------------------


def test_two_samples_of_three_and_five() -> None:
    """Same length tensors, one convention: the label at t is of token t, and no sample's first token has one."""
    short, long = sample(2, 1), sample(2, 3)
    (row,) = first_fit([3, 5], 10)
    batch = pack([short, long], [row], pad_id=99, width=10)
    assert row == [1, 0]
    assert batch.token_BT[0].tolist() == [*long.prompt, *long.answer, *short.prompt, *short.answer, 99, 99]
    assert batch.position_BT[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert batch.segment_BT[0].tolist() == [1] * 5 + [0] * 3 + [PADDING] * 2
    assert batch.scored_N.tolist() == [2, 3, 4, 7] and batch.predictor_N.tolist() == [1, 2, 3, 6]
    assert batch.scored(batch.token_BT).tolist() == [*long.answer, *short.answer]
    assert batch.scored(batch.behaviour_BT).tolist() == [*long.behaviour, *short.behaviour]
    assert batch.scored(batch.advantage_BT).tolist() == pytest.approx([long.advantage] * 3 + [short.advantage])
    hidden = torch.arange(10.0)[None, :, None]
    assert batch.predicting(hidden)[:, 0].tolist() == [1, 2, 3, 6]


def test_dtypes_at_the_border() -> None:
    batch = pack([sample(2, 3)], [[0]])
    assert batch.token_BT.dtype == batch.position_BT.dtype == torch.int64
    assert batch.behaviour_BT.dtype == batch.advantage_BT.dtype == torch.float32
    ids = np.arange(3, dtype=np.float32)
    with pytest.raises(ValueError, match="answer is float32"):
        TrainSample(prompt=np.ones(2, dtype=np.int32), answer=ids, behaviour=ids, advantage=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt is int32 of shape"):
        TrainSample(prompt=np.ones(0, dtype=np.int32), answer=sample(1, 3).answer, behaviour=ids, advantage=1.0)
    with pytest.raises(ValueError, match="2 behaviour log-probabilities for 3"):
        TrainSample(prompt=sample(2, 3).prompt, answer=sample(2, 3).answer, behaviour=ids[:2], advantage=1.0)


def test_attention_stays_inside_a_sample() -> None:
    batch = pack([sample(2, 1), sample(1, 1)], [[0, 1]], width=6)
    mask = batch.attention_B1TT()
    assert mask is not None
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert pack([sample(2, 1), sample(1, 1)], [[0], [1]]).attention_B1TT() is None, "plain causal serves"


@pytest.mark.parametrize(
    ("tokens", "length"),
    [([5, 6, 2, 7, 2, 8, 9, 9], 3), ([5, 6, 7], 3), ([2], 1), ([3, 5], 1)],
)
def test_answer_ends_with_its_first_end_token(tokens: list[int], length: int) -> None:
    """Up to and including the first end token; no end token: all of it."""
    assert answer_length(tokens, {2, 3}) == length


def test_cut_is_counted() -> None:
    kept, count = cut([sample(3, 7), sample(3, 2)], 8)
    assert [len(s) for s in kept] == [8, 5] and count == 1
    assert kept[0].behaviour.tolist() == sample(3, 7).behaviour[:5].tolist()
    with pytest.raises(ValueError, match="leaves no room"):
        cut([sample(8, 1)], 8)


# --- packed = unpacked ------------------------------------------------------------------------------------------------


def tiny(family: Family) -> Decoder:
    config = ModelConfig(
        family=family,
        layers=2,
        hidden=24,
        intermediate=40,
        query_heads=4,
        kv_heads=2,
        head_dim=6,
        vocabulary=31,
        positions_max=128,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    return random_decoder(config, seed=5, std=0.3)


def scored_logprobs(model: Decoder, batch: PackedBatch, mask: Tensor | None) -> Tensor:
    hidden = model(batch.token_BT, positions_BT=batch.position_BT, mask=mask)
    assert model.head is not None
    return head_logprobs(batch.predicting(hidden), model.head, batch.scored(batch.token_BT), temperature=0.7)[0]


SAMPLES = [sample(p, a) for p, a in [(3, 11), (2, 5), (5, 1), (1, 7), (4, 4), (3, 2), (2, 13)]]


def train_gradient(model: Decoder, batches: list[PackedBatch]) -> tuple[dict[int, Tensor], list[Tensor], float]:
    """(log-probabilities by sample, gradients, loss) of one optimizer step over micro-batches."""
    model.zero_grad()
    totals = batches[0].totals()
    for batch in batches[1:]:
        totals = totals + batch.totals()
    denominator = totals.denominator(Normaliser.TOKENS, 13)
    by_sample: dict[int, Tensor] = {}
    loss = 0.0
    for batch in batches:
        logprob = scored_logprobs(model, batch, batch.attention_B1TT())
        mask = torch.ones_like(logprob, dtype=torch.bool)
        behaviour, advantage = batch.scored(batch.behaviour_BT), batch.scored(batch.advantage_BT)
        result = grpo_loss(logprob, behaviour, advantage, mask, denominator, LossConfig())
        result.loss.backward()
        loss += result.loss.item()
        owner = batch.scored(batch.segment_BT)
        by_sample |= {int(index): logprob[owner == index].detach() for index in owner.unique()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return by_sample, gradients, loss


@pytest.mark.parametrize(("family", "capacity"), [*((family, 33) for family in FAMILIES), ("llama", 15), ("llama", 90)])
def test_packed_equals_unpacked(family: Family, capacity: int) -> None:
    """Log-probabilities, loss and every gradient, to 1e-5: one sample a row against first-fit rows."""
    model = tiny(family)
    rows = first_fit([len(s) for s in SAMPLES], capacity)
    assert len(rows) < len(SAMPLES)
    alone = train_gradient(model, [pack(SAMPLES, [[index]]) for index in range(len(SAMPLES))])
    packed = train_gradient(model, [pack(SAMPLES, rows, width=capacity)])
    assert packed[0].keys() == alone[0].keys() == set(range(len(SAMPLES)))
    for index, logprob in alone[0].items():
        assert len(logprob) == len(SAMPLES[index].answer)
        torch.testing.assert_close(packed[0][index], logprob, rtol=0, atol=1e-5)
    assert packed[2] == pytest.approx(alone[2], abs=1e-5)
    for ours, theirs in zip(packed[1], alone[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_comparison_would_see_a_leak() -> None:
    """Without the block mask, or with positions that run on, the same comparison fails."""
    model = tiny("llama")
    batch = pack(SAMPLES, [[0, 1, 2]])
    good = scored_logprobs(model, batch, batch.attention_B1TT())
    assert (scored_logprobs(model, batch, None) - good).abs().max() > 1e-2
    running = PackedBatch(
        **{k: v for k, v in vars(batch).items() if k != "position_BT"},
        position_BT=torch.arange(batch.token_BT.shape[1]).expand_as(batch.token_BT),
    )
    shifted = scored_logprobs(model, running, batch.attention_B1TT())
    assert (shifted - good).abs().max() < 1e-4, "RoPE is relative: running positions alone do no harm inside the mask"


def test_one_sample_does_not_depend_on_its_neighbours() -> None:
    """Change every token of A: nothing of B changes, and the gradient of B's loss at A's tokens is exactly 0."""
    model = tiny("qwen3")
    results = []
    for seed in (0, 1):
        samples = [sample(3, 11, seed), sample(2, 13)]
        batch = pack(samples, [[0, 1]])
        logprob = scored_logprobs(model, batch, batch.attention_B1TT())
        results.append(logprob[batch.scored(batch.segment_BT) == 1])
    assert torch.equal(results[0], results[1])


# --- a prompt shared by its answers -----------------------------------------------------------------------------------


def group(prompt: int, answers: list[int], seed: int) -> list[TrainSample]:
    base = sample(prompt, 1, seed)
    return [
        TrainSample(prompt=base.prompt, answer=s.answer, behaviour=s.behaviour, advantage=s.advantage)
        for s in (sample(prompt, n, seed + 10 + i) for i, n in enumerate(answers))
    ]


GROUPS = [*group(5, [3, 7, 1, 2], 1), *group(2, [11, 4], 2), *group(3, [6], 3)]


def test_a_shared_prompt_by_hand() -> None:
    """Two answers to one prompt: the prompt stands once, both go on from its end, neither sees the other."""
    samples = group(2, [2, 1], 1)
    batch = pack(samples, [[0, 1]], width=6, share_prompts=True)
    assert batch.token_BT[0].tolist() == [*samples[0].prompt, *samples[0].answer, *samples[1].answer, 0]
    assert batch.position_BT[0].tolist() == [0, 1, 2, 3, 2, 0]
    assert batch.scored_N.tolist() == [2, 3, 4] and batch.predictor_N.tolist() == [1, 2, 1]
    mask = batch.attention_B1TT()
    assert mask is not None
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert batch.totals().tokens == 3 and batch.totals().sequences == 2
    assert row_length(samples, [0, 1]) == 5


@pytest.mark.parametrize("capacity", [13, 19, 31, 100])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shared_prompts_change_nothing(family: Family, capacity: int) -> None:
    """Log-probabilities, loss and gradients equal one sample a row; each answer token is trained once."""
    model = tiny(family)
    rows = _rows_of_blocks(GROUPS, capacity, share_prompts=True)
    assert sorted(index for row in rows for index in row) == list(range(len(GROUPS)))
    assert all(row_length(GROUPS, row) <= capacity for row in rows)
    shared = pack(GROUPS, rows, share_prompts=True)
    assert shared.totals().tokens == sum(len(s.answer) for s in GROUPS)
    if capacity > 13:
        assert sum(row_length(GROUPS, row) for row in rows) < sum(len(s) for s in GROUPS)
    alone = train_gradient(model, [pack(GROUPS, [[index]]) for index in range(len(GROUPS))])
    packed = train_gradient(model, [shared])
    for index, logprob in alone[0].items():
        torch.testing.assert_close(packed[0][index], logprob, rtol=0, atol=1e-5)
    assert packed[2] == pytest.approx(alone[2], abs=1e-5)
    for ours, theirs in zip(packed[1], alone[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_plan_weighs_cells_against_attention() -> None:
    """Long prompts with short answers are shared; a lone long sample is not padded for it; every sample once."""
    long_prompts = [s for seed in range(4) for s in group(60, [8] * 16, 100 * seed)]
    rows = plan_rows(long_prompts, hidden=576)
    cells = sum(row_length(long_prompts, row) for row in rows)
    assert cells < 0.35 * sum(len(s) for s in long_prompts)
    assert sorted(index for row in rows for index in row) == list(range(64))
    plain = plan_rows(long_prompts, hidden=576, share_prompts=False)
    assert sum(len(row) for row in plain) == 64
    different = [sample(10, 50, seed) for seed in range(8)]
    assert plan_rows(different, hidden=16) == [[index] for index in range(8)], "nothing to share: no wider rows"
    assert plan_rows([], hidden=8) == []


def test_lay_and_unlay() -> None:
    """Values by sample go to their cells and come back, whatever the order of rows."""
    values = [np.arange(len(s.answer), dtype=np.float32) + 100 * i for i, s in enumerate(GROUPS)]
    batch = pack(GROUPS, [[6], [5, 4], [1, 3, 0, 2]], share_prompts=True)
    back = batch.unlay(batch.scored(batch.lay(values)))
    assert back.keys() == set(range(7)) and all(np.array_equal(back[i], values[i]) for i in back)
