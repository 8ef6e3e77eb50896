"""The catalogue of attacks: one function, and one line in `ATTACKS`.

An attack is a function from a workshop to a worker's engine (`cheats.py` holds those that scenarios name too). Its line
says of which kind it is, what it saves its author, and which verifiers ought to catch it; the arena measures both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from refimpl.attacks.altered import Altered, Prompts
from refimpl.attacks.cheats import CHEATS, proven
from refimpl.attacks.engines import (
    BestOf,
    LockStep,
    Mixed,
    OtherSampling,
    Prefilled,
    Priced,
    corrected,
    in_the_tail,
    uncorrected,
)
from refimpl.attacks.quantize import (
    low_rank_moved,
    perturbed,
    pruned,
    quantized,
    with_fp8_activations,
    without_last_layers,
)
from refimpl.model.sampler import Sampling
from refimpl.model.transformer import Decoder
from refimpl.toploc.proof import CHUNK_TOKENS, TOP_K
from refimpl.workshop import BoundEngine, Workshop

Kind = Literal["weights", "prompt", "sampling", "ending", "submission", "adaptive"]
Make = Callable[[Workshop], Any]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A line of the catalogue."""

    kind: Kind
    engine: Make
    saves: str  # why anybody would
    caught_by: tuple[str, ...]  # names of verifiers; empty: nobody can by one sequence
    bytes_per_weight: float = 2.0  # what a real implementation of it would read
    bytes_per_kv: float = 2.0

    @property
    def says(self) -> str:
        return (self.engine.__doc__ or "").strip()


FOUR_BITS = 0.53  # bytes a weight: 4 bits, and a scale of 16 for each group of 64


# ------------------------------------------------------------------------------------------------------------- weights
def changed(says: str, name: str, change: Callable[[Decoder], Decoder]) -> Make:
    """An honest engine around a changed decoder."""

    def make(shop: Workshop) -> Any:
        return shop.engine(shop.variant(name, lambda: change(shop.decoder())))

    make.__doc__ = says
    return make


six_bits = changed("Weights in 6 bits, groups of 64.", "6bit", lambda d: quantized(d, bits=6, group=64))
four_bits_fine = changed("Weights in 4 bits, groups of 16.", "4bit16", lambda d: quantized(d, bits=4, group=16))
three_bits = changed("Weights in 3 bits, groups of 32.", "3bit", lambda d: quantized(d, bits=3, group=32))
eight_bit_activations = changed("Activations between layers in 8-bit floats.", "fp8", with_fp8_activations)
early_exit = changed(
    "Leaves after half of the layers.", "exit", lambda d: without_last_layers(d, max(1, len(d.layers) // 2))
)
older_version = changed(
    "Weights of some steps ago: every weight moved by 0.5 % of itself.",
    "older",
    lambda d: perturbed(d, relative=0.005, seed=1),
)
adapter_left_out = changed(
    "Leaves out an agreed adapter of rank 4 that makes up 3 % of each matrix.",
    "adapter",
    lambda d: low_rank_moved(d, rank=4, relative=0.03, seed=2),
)
pruned_weights = changed("Two of every four weights set to zero.", "pruned", lambda d: pruned(d, keep=2, of=4))


# -------------------------------------------------------------------------------------------------------------- prompt
def prompt_truncated(shop: Workshop) -> Any:
    """Leaves out the first third of the prompt."""
    return Altered(
        shop.engine(shop.decoder()), before=lambda prompts: [prompt[len(prompt) // 3 :] for prompt in prompts]
    )


def prompt_replaced(shop: Workshop) -> Any:
    """Puts an instruction of its own in the place of the first third of the prompt."""
    own = shop.inserted_ids()
    return Altered(
        shop.engine(shop.decoder()), before=lambda prompts: [[*own, *prompt[len(prompt) // 3 :]] for prompt in prompts]
    )


# ------------------------------------------------------------------------------------------------------------ sampling
def resampled(says: str, change: Callable[[Sampling], Sampling]) -> Make:
    """The right model with another rule."""

    def make(shop: Workshop) -> Any:
        return OtherSampling(shop.engine(shop.decoder()), sampling=change(shop.sampling))

    make.__doc__ = says
    return make


def _temperature(by: float) -> Callable[[Sampling], Sampling]:
    return lambda rule: dataclasses.replace(rule, temperature=rule.temperature + by)


def _top_p(by: float) -> Callable[[Sampling], Sampling]:
    return lambda rule: dataclasses.replace(rule, top_p=min(1.0, rule.top_p + by))


greedy = resampled("Takes the likeliest token always.", lambda rule: Sampling(temperature=0.0))
warmer = resampled("Temperature 0.1 higher.", _temperature(0.1))
cooler = resampled("Temperature 0.1 lower.", _temperature(-0.1))
top_p_narrower = resampled("Top-p 0.05 lower.", _top_p(-0.05))
top_p_wider = resampled("Top-p 0.05 higher.", _top_p(0.05))
top_k_narrow = resampled("Only the five likeliest tokens.", lambda rule: dataclasses.replace(rule, top_k=5))


def wrong_seed(shop: Workshop) -> Any:
    """Samples by the rule, with a seed of its own."""
    return OtherSampling(shop.engine(shop.decoder()), seed=lambda seed: seed + 104_729)


def best_of_four(shop: Workshop) -> Any:
    """Hands in the likeliest of four answers."""
    return BestOf(shop.engine(shop.decoder()), 4)


def cheap_engine(shop: Workshop) -> BoundEngine:
    """A model without its last quarter of layers: the draft."""
    whole = shop.decoder()
    return shop.engine(shop.variant("cheap", lambda: without_last_layers(whole, max(1, len(whole.layers) // 4))))


def draft_uncorrected(shop: Workshop) -> Any:
    """Speculative decoding that keeps a draft's token if the right model finds it likely enough."""
    right = shop.engine(shop.decoder())
    mode = shop.agreement.proof_mode
    return LockStep(right, cheap_engine(shop), mode, uncorrected, commits_right=True, drafts=True)


def draft_corrected(shop: Workshop) -> Any:
    """Correct speculative decoding, which draws from the right distribution but not by the seed."""
    right = shop.engine(shop.decoder())
    return LockStep(right, cheap_engine(shop), shop.agreement.proof_mode, corrected, commits_right=True, drafts=True)


def _prefilled(shop: Workshop, write: Callable[[Prompts, list[Any]], list[np.ndarray]], after: bool = False) -> Any:
    return Prefilled(shop.engine(shop.decoder()), shop.agreement.proof_mode, write, after)


def human_text(shop: Workshop) -> Any:
    """A text that somebody wrote (other prompts of the set), read once by the right model."""
    count = shop.agreement.answer_tokens_max

    def write(prompts: Prompts, honest: list[Any]) -> list[np.ndarray]:
        texts = []
        for at in range(len(prompts)):
            text: list[int] = []
            while len(text) < count:
                text += shop.tokenizer(shop.problems.text((97 + at * 31 + len(text)) % shop.problem_count))["input_ids"]
            texts.append(np.array(text[:count], dtype=np.int32))
        return texts

    return _prefilled(shop, write)


def repeated_text(shop: Workshop) -> Any:
    """The prompt's last eight tokens again and again, read once by the right model."""
    count = shop.agreement.answer_tokens_max
    return _prefilled(shop, lambda prompts, honest: [np.resize(np.array(p[-8:], np.int32), count) for p in prompts])


# -------------------------------------------------------------------------------------------------------------- ending
def shortened(answer: Any, count: int, shop: Workshop, last: int | None = None) -> Any:
    """The first `count` tokens with proofs of their states; the last one replaced by `last`."""
    tokens = answer.tokens[:count].copy()
    if last is not None:
        tokens[-1] = last
    cut = dataclasses.replace(answer, tokens=tokens, logprobs=answer.logprobs[:count])
    return proven(cut, answer.states[:count], shop.agreement.proof_mode)


def cut_early(shop: Workshop) -> Any:
    """Stops after half of the tokens."""
    return Altered(
        shop.engine(shop.decoder(), keep_states=True),
        after=lambda prompts, answers: [shortened(a, max(1, len(a.tokens) // 2), shop) for a in answers],
    )


def cut_with_end(shop: Workshop) -> Any:
    """Stops after half of the tokens and writes an end token there."""
    end = min(shop.decoder().config.eos_ids)
    return Altered(
        shop.engine(shop.decoder(), keep_states=True),
        after=lambda prompts, answers: [shortened(a, max(1, len(a.tokens) // 2), shop, end) for a in answers],
    )


def padded(shop: Workshop) -> Any:
    """Writes three quarters, and fills up with the last token."""

    def write(prompts: Prompts, honest: list[Any]) -> list[np.ndarray]:
        texts = []
        for answer in honest:
            kept = answer.tokens[: max(1, 3 * len(answer.tokens) // 4)]
            texts.append(np.concatenate([kept, np.full(len(answer.tokens) - len(kept), kept[-1], np.int32)]))
        return texts

    return _prefilled(shop, write, after=True)


# ------------------------------------------------------------------------------------------------------------ adaptive
def outside_top_k(shop: Workshop) -> Any:
    """Changes every number of the states that a top-k commitment does not bind."""

    def change(answer: Any) -> Any:
        if answer.states is None:
            return answer
        states = answer.states.clone()
        for part in states.split(CHUNK_TOKENS):
            flat = part.view(-1)
            bound = flat.float().abs().topk(min(TOP_K, flat.numel())).indices
            kept = flat[bound].clone()
            flat.copy_(flat.roll(1).clamp(-kept.abs().min() / 2, kept.abs().min() / 2))
            flat[bound] = kept
        return dataclasses.replace(answer, states=states)

    return Altered(shop.engine(shop.decoder()), after=lambda prompts, answers: [change(a) for a in answers])


def one_in_four(shop: Workshop) -> Any:
    """4-bit weights, for one sequence in four."""
    return Mixed(
        shop.engine(shop.decoder()), engine_of("weights-4bit")(shop), lambda seeds, wrong: [s % 4 == 0 for s in seeds]
    )


def on_long_answers(shop: Workshop) -> Any:
    """4-bit weights, for answers that reach the length limit."""
    limit = shop.agreement.answer_tokens_max
    return Mixed(
        shop.engine(shop.decoder()),
        engine_of("weights-4bit")(shop),
        lambda seeds, wrong: [len(answer.tokens) >= limit for answer in wrong],
    )


def after_good_record(shop: Workshop) -> Any:
    """Honest for the first half of the sequences, 4-bit weights from then on."""

    def when(seeds: Sequence[int], wrong: list[Any]) -> list[bool]:
        return [seed >= sorted(seeds)[len(seeds) // 2] for seed in seeds]

    return Mixed(shop.engine(shop.decoder()), engine_of("weights-4bit")(shop), when)


def in_tail(shop: Workshop) -> Any:
    """4-bit weights for the last quarter of the longest answer."""
    whole = shop.decoder()
    cheap = shop.engine(shop.variant("4bit", lambda: quantized(whole, bits=4, group=64)))
    cheap.size = dataclasses.replace(cheap.size, bytes_per_weight=FOUR_BITS)
    choose = in_the_tail(0.75, shop.agreement.answer_tokens_max)
    return LockStep(shop.engine(whole), cheap, shop.agreement.proof_mode, choose, commits_right=False, drafts=False)


STATES = ("toploc-sequence", "projection")  # whoever looks at activations
SEED = ("sampling-proof", "anytime", "exact-match", "recompute")  # whoever looks at the seed
PROOFS = ("toploc-strict", "toploc-sequence", "projection")
MEMORY = "reads fewer bytes of weights a token"
NOTHING = "no compute: a higher reward, or a text of its choice"


def _line(kind: Kind, engine: Make, saves: str, caught_by: tuple[str, ...], **options: float) -> Attack:
    return Attack(kind=kind, engine=engine, saves=saves, caught_by=caught_by, **options)


def engine_of(name: str) -> Make:
    """The worker's engine of an attack, whose work is priced as a real implementation's of it."""
    attack = ATTACKS[name]

    def make(shop: Workshop) -> Any:
        made = attack.engine(shop)
        if (attack.bytes_per_weight, attack.bytes_per_kv) == (2.0, 2.0):
            return made
        return Priced(made, bytes_per_weight=attack.bytes_per_weight, bytes_per_kv=attack.bytes_per_kv)

    make.__doc__ = attack.says
    return make


ATTACKS: dict[str, Attack] = {
    "weights-8bit": _line("weights", CHEATS["weights-8bit"], MEMORY, STATES, bytes_per_weight=1.0),
    "weights-6bit": _line("weights", six_bits, MEMORY, STATES, bytes_per_weight=0.78),
    "weights-4bit": _line("weights", CHEATS["weights-4bit"], MEMORY, STATES, bytes_per_weight=FOUR_BITS),
    "weights-4bit-g16": _line("weights", four_bits_fine, MEMORY, STATES, bytes_per_weight=0.63),
    "weights-3bit": _line("weights", three_bits, MEMORY, STATES, bytes_per_weight=0.44),
    "activations-fp8": _line("weights", eight_bit_activations, "faster products in 8 bits", STATES),
    "kv-8bit": _line("weights", CHEATS["kv-8bit"], "half of the cache: a larger batch", STATES, bytes_per_kv=1.0),
    "layers-skipped": _line("weights", CHEATS["layers-skipped"], "an eighth of the layers", STATES),
    "early-exit": _line("weights", early_exit, "half of the layers", STATES),
    "pruned": _line("weights", pruned_weights, "half of the weights", STATES, bytes_per_weight=1.13),
    "other-checkpoint": _line("weights", CHEATS["other-checkpoint"], "a download", STATES),
    "older-version": _line("weights", older_version, "a download", STATES),
    "adapter-left-out": _line("weights", adapter_left_out, "a download and some compute", STATES),
    "sign-flipped": _line("weights", CHEATS["sign-flipped"], "nothing: shows a hole", PROOFS),
    "prompt-altered": _line("prompt", CHEATS["prompt-altered"], "shorter answers", STATES),
    "prompt-truncated": _line("prompt", prompt_truncated, "some prefill", STATES),
    "prompt-replaced": _line("prompt", prompt_replaced, "some prefill, shorter answers", STATES),
    "greedy": _line("sampling", greedy, NOTHING, SEED),
    "temperature-up": _line("sampling", warmer, NOTHING, SEED),
    "temperature-down": _line("sampling", cooler, NOTHING, SEED),
    "top-p-narrower": _line("sampling", top_p_narrower, NOTHING, SEED),
    "top-p-wider": _line("sampling", top_p_wider, NOTHING, SEED),
    "top-k-5": _line("sampling", top_k_narrow, NOTHING, SEED),
    "wrong-seed": _line("sampling", wrong_seed, NOTHING, SEED),
    "best-of-4": _line("sampling", best_of_four, NOTHING, SEED),
    "draft-uncorrected": _line("sampling", draft_uncorrected, "decode steps of the right model", SEED),
    "draft-corrected": _line("sampling", draft_corrected, "decode steps of the right model", SEED),
    "cheap-tokens": _line("sampling", CHEATS["cheap-tokens"], "decode steps of the right model", SEED),
    "human-text": _line("sampling", human_text, "all decoding", (*SEED, "shape-calibrated")),
    "repeated-text": _line("sampling", repeated_text, "all decoding", SEED),
    "cut-early": _line("ending", cut_early, "half of the decoding", ("termination", "termination-calibrated")),
    "cut-with-end": _line(
        "ending", cut_with_end, "half of the decoding", ("termination-calibrated", "termination-seed", "recompute")
    ),
    "padded": _line("ending", padded, "a quarter of the decoding", SEED),
    "proofs-too-few": _line("submission", CHEATS["proofs-too-few"], "nothing: hides later tokens", PROOFS),
    "proofs-null": _line("submission", CHEATS["proofs-null"], "all proving", PROOFS),
    "proofs-garbage": _line("submission", CHEATS["proofs-garbage"], "all proving", PROOFS),
    "proof-copied": _line("submission", CHEATS["proof-copied"], "all proving", PROOFS),
    "outside-top-k": _line("adaptive", outside_top_k, "nothing: shows a hole", ("projection",)),
    "one-in-four": _line("adaptive", one_in_four, MEMORY, STATES),
    "long-answers-only": _line("adaptive", on_long_answers, MEMORY, STATES),
    "after-good-record": _line("adaptive", after_good_record, MEMORY, STATES),
    "in-the-tail": _line("adaptive", in_tail, MEMORY, STATES),
}
