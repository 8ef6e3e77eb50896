"""The engine: answers that do not depend on their neighbours, proofs made on the way, replays that check them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import refimpl.engine
from refimpl.engine import Completion, ProofSettings, TorchEngine, set_threads
from refimpl.model.sampler import Sampling
from refimpl.model.transformer import Decoder
from refimpl.model.weights import load_decoder
from refimpl.toploc.check import verify_proofs
from refimpl.toploc.proof import build_proofs

TINY = Path(__file__).parent / "data/tiny-model"
EOS = 1
DRAWN = Sampling(temperature=0.9)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def tiny() -> Decoder:
    return load_decoder(TINY, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def tiny_bf16() -> Decoder:
    return load_decoder(TINY, dtype=torch.bfloat16, device="cpu")


def engine(model: Decoder, **options: Any) -> TorchEngine:
    return TorchEngine(model, **{"name": "tiny", "proof": ProofSettings(), **options})


def prompts(count: int) -> list[list[int]]:
    """Sorting problems of 41 … 57 digits, and additions between them: unequal lengths of prompt and answer."""
    rng = np.random.default_rng(5)
    made = []
    for index in range(count):
        if index % 3 == 2:
            made.append([*rng.integers(3, 13, 2).tolist(), 13, *rng.integers(3, 13, 2).tolist(), 14])
        else:
            made.append([*rng.integers(3, 13, int(rng.integers(41, 58))).tolist(), 15])
    return made


def answer(maker: TorchEngine, asked: Sequence[Sequence[int]], sampling: Sampling = DRAWN, **options: Any) -> Any:
    settings: dict[str, Any] = {"seeds": range(100, 100 + len(asked)), "max_new_tokens": 70, **options}
    return maker.generate(asked, sampling=sampling, **settings)


def texts(answers: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in answers]


class Passes:
    """Counts the model's passes and the tokens (padding too) of each."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        forward = model.forward

        def counted(inputs: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            self.shapes.append(tuple(inputs.shape))
            return forward(inputs, *rest, **options)

        monkeypatch.setattr(model, "forward", counted)


# ------------------------------------------------------------------------------------------------------------ answers
def test_greedy_answers_are_those_of_transformers(tiny: Decoder) -> None:
    twin = AutoModelForCausalLM.from_pretrained(TINY)
    asked = prompts(7)
    for prompt, ours in zip(asked, answer(engine(tiny, batch_max=3), asked, GREEDY), strict=True):
        inputs = torch.tensor([prompt])
        theirs = twin.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=70, do_sample=False, pad_token_id=0
        )
        assert ours.tokens.tolist() == theirs[0, len(prompt) :].tolist()
        assert ours.finished == ("eos" if ours.tokens[-1] == EOS else "length")


@pytest.mark.parametrize("options", [{"batch_max": 2}, {"batch_max": 5}, {"batch_max": 16}, {"pass_tokens_max": 7}])
def test_an_answer_does_not_depend_on_the_batch_it_was_drawn_in(tiny: Decoder, options: dict[str, Any]) -> None:
    """Ragged prompts, rows that end at different steps and are refilled: each as if it had been alone."""
    asked = prompts(11)
    alone = answer(engine(tiny, batch_max=1), asked)
    together = answer(engine(tiny, **options), asked)
    assert len({len(completion.tokens) for completion in alone}) > 5
    assert texts(together) == texts(alone)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert (one.tokens.dtype, one.logprobs.dtype) == (np.int32, np.float32)


def test_a_seed_belongs_to_a_sequence_whatever_its_place(tiny: Decoder) -> None:
    """T22: a seeded re-run must not differ because of what else was running."""
    asked, seeds = prompts(6), [3, 2**64 - 1, 0, 2**40, 7, 3]
    forwards = texts(answer(engine(tiny), asked, seeds=seeds))
    backwards = texts(answer(engine(tiny, batch_max=4), asked[::-1], seeds=seeds[::-1]))
    assert backwards[::-1] == forwards
    assert texts(answer(engine(tiny), asked, seeds=[seed + 1 for seed in range(6)])) != forwards
    maker = engine(tiny)
    assert texts(answer(maker, asked, seeds=seeds)) == texts(answer(maker, asked, seeds=seeds)) == forwards


def test_the_end_of_text_can_be_named_or_forbidden(tiny: Decoder) -> None:
    asked = prompts(3)
    endless = answer(engine(tiny), asked, eos_ids=frozenset())
    assert [(len(c.tokens), c.finished) for c in endless] == [(70, "length")] * 3
    nine = answer(engine(tiny), asked, eos_ids=frozenset({5}))  # the digit 2
    assert [c.tokens[-1] for c in nine] == [5] * 3 and all((c.tokens[:-1] != 5).all() for c in nine)
    assert {c.finished for c in nine} == {"eos"}


# ------------------------------------------------------------------------------------------------------------- proofs
def test_proofs_are_made_as_decoding_goes_and_equal_those_made_at_the_end(
    tiny_bf16: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "each time 32 states are full, not at the end" """
    sizes: list[int] = []

    def spied(states: torch.Tensor, **options: Any) -> Any:
        sizes.append(len(states))
        return build_proofs(states, **options)

    monkeypatch.setattr(refimpl.engine, "build_proofs", spied)
    answers = answer(engine(tiny_bf16, batch_max=3, keep_states=True), prompts(7))
    assert max(sizes) <= 3 * 32
    assert {32, 64} & set(sizes) and any(size < 32 for size in sizes)
    for completion in answers:
        assert completion.states.shape == (len(completion.tokens), 64)
        assert completion.states.dtype == torch.bfloat16
        assert completion.proofs == tuple(proof.encode() for proof in build_proofs(completion.states))
        assert len(completion.proofs) == -(-len(completion.tokens) // 32)


def test_padding_is_dropped_before_hashing(tiny: Decoder) -> None:
    """T20: five sequences of unequal length together commit to what each commits to alone."""
    asked = prompts(5)
    together, alone = (answer(engine(tiny, batch_max=b, keep_states=True), asked, GREEDY) for b in (5, 1))
    for one, other in zip(together, alone, strict=True):
        # bf16 of float32 states: equal but where noise of 1e-6 falls on a rounding border
        assert (one.states == other.states).float().mean() > 0.99
        assert verify_proofs(other.states, one.proofs).accepted


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "split"])
def test_honest_proofs_pass_on_replay_whatever_batch_and_kernel(tiny_bf16: Decoder, kernel: Any) -> None:
    asked = prompts(8)
    maker = engine(tiny_bf16.with_attention(kernel), batch_max=8)
    answers = answer(maker, asked)
    for completion, replay in zip(answers, engine(tiny_bf16).replay(asked, texts(answers)), strict=True):
        verdict = verify_proofs(replay.states, completion.proofs)
        assert verdict.accepted, verdict.reason
        assert max(chunk.exponent_mismatches for chunk in verdict.chunks) <= 10


def test_proofs_of_another_text_fail_on_replay(tiny_bf16: Decoder) -> None:
    asked = [prompt for prompt in prompts(8) if len(prompt) > 10]
    answers = answer(engine(tiny_bf16), asked, GREEDY)
    replays = engine(tiny_bf16).replay(asked, texts(answers)[1:] + texts(answers)[:1])
    accepted = [verify_proofs(r.states, c.proofs).accepted for r, c in zip(replays, answers, strict=True)]
    assert not any(accepted)


def test_without_proof_settings_nothing_is_proven(tiny: Decoder) -> None:
    assert [c.proofs for c in answer(engine(tiny, proof=None), prompts(3))] == [()] * 3


def test_chunks_and_values_per_proof_follow_the_settings(tiny_bf16: Decoder) -> None:
    settings = ProofSettings(chunk_tokens=8, top_k=16)
    for completion in answer(engine(tiny_bf16, proof=settings, batch_max=3), prompts(4)):
        assert len(completion.proofs) == -(-len(completion.tokens) // 8)
        assert {len(proof) for proof in completion.proofs} == {2 + 2 * 16}


# ------------------------------------------------------------------------------------------------------------- replay
def test_states_are_those_that_chose_each_token(tiny: Decoder) -> None:
    """Positions prompt_len − 1 … prompt_len + n − 2: n states for n tokens."""
    prompt, said = prompts(1)[0], [3, 3, 4, 5, 5]
    with torch.inference_mode():
        whole = tiny(torch.tensor([prompt + said]))[0]
        logits = tiny.logits(whole[len(prompt) - 1 : -1])
    (replay,) = engine(tiny).replay([prompt], [np.array(said, dtype=np.int32)])
    torch.testing.assert_close(replay.hidden, whole[len(prompt) - 1 : -1], atol=1e-5, rtol=1e-5)
    assert replay.states.shape == (5, 64) and replay.states.dtype == torch.bfloat16
    assert replay.tokens.tolist() == said
    torch.testing.assert_close(replay.logits(), logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(replay.logits(1, 3), replay.logits()[1:3])


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(temperature=0.7, top_k=3, top_p=0.9, min_p=0.01)])
def test_a_replay_gives_the_log_probabilities_that_were_recorded(tiny: Decoder, sampling: Sampling) -> None:
    """R16: the processed distribution on both sides."""
    asked = prompts(5)
    answers = answer(engine(tiny, batch_max=3), asked, sampling)
    for completion, replay in zip(answers, engine(tiny).replay(asked, texts(answers)), strict=True):
        rule = Sampling() if sampling.greedy else sampling  # greedy choice records the raw distribution
        np.testing.assert_allclose(replay.logprobs(rule).numpy(), completion.logprobs, atol=1e-4)


def test_a_token_that_could_not_be_drawn_has_no_probability(tiny: Decoder) -> None:
    asked = prompts(1)
    (said,) = texts(answer(engine(tiny), asked, GREEDY))
    said[4] = 13  # a plus sign among the digits
    (replay,) = engine(tiny).replay(asked, [said])
    logprobs = replay.logprobs(Sampling(top_k=3))
    assert logprobs[4] == -torch.inf and logprobs[:4].isfinite().all()
    assert replay.logprobs().isfinite().all()


def test_the_probability_of_ending_is_read_at_each_token(tiny: Decoder) -> None:
    asked = prompts(3)
    answers = answer(engine(tiny), asked, GREEDY)
    for completion, replay in zip(answers, engine(tiny).replay(asked, texts(answers)), strict=True):
        ending = replay.eos_probability()
        assert completion.finished == "eos" and ending[-1] > 0.2  # it was the likeliest of 16
        torch.testing.assert_close(ending, replay.logits().softmax(-1)[:, EOS])
        assert torch.equal(replay.eos_probability({EOS, 0}), replay.logits().softmax(-1)[:, :2].sum(-1))


def test_one_token_and_empty_answers(tiny: Decoder) -> None:
    asked = prompts(3)
    one = answer(engine(tiny), asked, max_new_tokens=1)
    assert [(len(c.tokens), len(c.proofs)) for c in one] == [(1, 1)] * 3
    replays = engine(tiny).replay(asked, [one[0].tokens, [], one[2].tokens])
    assert [tuple(replay.states.shape) for replay in replays] == [(1, 64), (0, 64), (1, 64)]
    empty = replays[1]
    assert (len(empty.logprobs()), len(empty.eos_probability()), empty.logits().shape) == (0, 0, (0, 16))
    assert engine(tiny).replay([], []) == [] == engine(tiny).generate([], sampling=GREEDY, seeds=[], max_new_tokens=1)


def test_memory_is_bounded_by_the_tokens_of_a_pass(tiny: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(7)
    answers = texts(answer(engine(tiny), asked))
    free = engine(tiny).replay(asked, answers)
    passes = Passes(tiny, monkeypatch)
    bound = engine(tiny, pass_tokens_max=50)  # less than the longest text: that one goes through in pieces
    for one, other in zip(free, bound.replay(asked, answers), strict=True):
        torch.testing.assert_close(one.hidden, other.hidden, atol=2e-5, rtol=1e-4)
    assert max(B * T for B, T in passes.shapes) <= 50
    passes.shapes.clear()
    assert texts(answer(bound, asked)) == answers
    assert max(B * T for B, T in passes.shapes) <= 50


def test_verifying_takes_one_pass_where_generating_took_one_a_token(
    tiny: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(6)
    passes = Passes(tiny, monkeypatch)
    answers = texts(answer(engine(tiny), asked))
    assert len(passes.shapes) == max(map(len, answers))
    passes.shapes.clear()
    engine(tiny).replay(asked, answers)
    assert len(passes.shapes) == 1


def test_replayed_states_are_ordinary_tensors(tiny: Decoder) -> None:
    (replay,) = engine(tiny).replay(prompts(1), [[3, 4]])
    assert not replay.states.is_inference() and not replay.hidden.is_inference()
    replay.hidden.add_(1)


# -------------------------------------------------------------------------------------------------- what is not taken
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "a prompt is empty, expected at least one token"),
        ([3, 16], r"token 16 in a text, expected 0 … 15 \(tiny\)"),
        ([3, -1], r"token -1 in a text, expected 0 … 15 \(tiny\)"),
        ([3] * 250, r"a text has 257 tokens, expected at most 256 \(tiny\)"),
    ],
)
def test_texts_that_the_model_cannot_read_are_refused_before_work(
    tiny: Decoder, monkeypatch: pytest.MonkeyPatch, prompt: list[int], message: str
) -> None:
    passes = Passes(tiny, monkeypatch)
    with pytest.raises(ValueError, match=message):
        engine(tiny).generate([[3], prompt], sampling=GREEDY, seeds=[0, 0], max_new_tokens=7)
    with pytest.raises(ValueError, match=message):
        engine(tiny).replay([[3], prompt], [[3], [3] * 7])
    if len(prompt) == 2:  # the fault may be in the answer as well
        with pytest.raises(ValueError, match=message):
            engine(tiny).replay([[3]], [prompt])
    assert passes.shapes == []


def test_arguments_that_do_not_fit_are_refused(tiny: Decoder) -> None:
    with pytest.raises(ValueError, match="1 seeds for 2 prompts, expected one each"):
        engine(tiny).generate([[3], [4]], sampling=GREEDY, seeds=[0], max_new_tokens=7)
    with pytest.raises(ValueError, match="1 answers for 2 prompts, expected one each"):
        engine(tiny).replay([[3], [4]], [[5]])
    with pytest.raises(ValueError, match="max_new_tokens is 0, expected at least 1"):
        engine(tiny).generate([[3]], sampling=GREEDY, seeds=[0], max_new_tokens=0)
    with pytest.raises(ValueError, match=r"model holds layers range\(0, 3\), expected all 5"):
        engine(load_decoder(TINY, layers=range(0, 3)))


def test_what_happens_to_the_cache_shows_in_what_is_committed(tiny: Decoder) -> None:
    asked = prompts(2)
    plain, rounded = (
        answer(engine(tiny, store=store, keep_states=True), asked, GREEDY, max_new_tokens=5)
        for store in (None, lambda x: (x * 2).round() / 2)
    )
    for one, other in zip(plain, rounded, strict=True):
        assert torch.equal(one.states[0], other.states[0])  # the first token is drawn before the cache is read
        assert not torch.equal(one.states[1], other.states[1])


def test_threads_are_cores_over_processes_and_at_least_one() -> None:
    before = torch.get_num_threads()
    try:
        alone = set_threads()
        assert torch.get_num_threads() == alone >= 1
        assert set_threads(2) == max(1, alone // 2) == torch.get_num_threads()
        assert set_threads(10_000) == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------ the tiny model
def test_the_tiny_model_has_half_learnt_to_add(tiny: Decoder) -> None:
    """README: held-out additions about 0.39 right greedily, 0.24 drawn at temperature 1; a tokenizer that fits."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if (31 * a + 17 * b) % 11 == 0]
    asked = [tokenizer(f"{a}+{b}=")["input_ids"] for a, b in pairs]
    assert len(asked) == 737
    shares = []
    for sampling in (GREEDY, Sampling()):
        answers = answer(engine(tiny, batch_max=64, proof=None), asked, sampling, max_new_tokens=4)
        said = [tokenizer.decode(c.tokens) for c in answers]
        shares.append(np.mean([text == f"{a + b}<eos>" for text, (a, b) in zip(said, pairs, strict=True)]))
    assert 0.33 < shares[0] < 0.45 and 0.17 < shares[1] < 0.30
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 4_000_000
