"""Every way to cheat, as code against the real parts: one function, and one line in `CHEATS`.

A cheat takes the workshop and returns the engine that a dishonest worker runs instead of the honest one. It may use
another model, other prompts, or tamper with what an honest engine made. Nothing here knows how it will be judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from refimpl.attacks.altered import Altered, Prompts
from refimpl.attacks.quantize import mirrored, perturbed, quantized, round_to_bits, without_last_layers
from refimpl.toploc.proof import Mode, build_proofs
from refimpl.work import Forward, Several, Work
from refimpl.workshop import BoundEngine, Workshop


# ------------------------------------------------------------------------------------------------ another computation
def four_bit_weights(shop: Workshop) -> Any:
    """Weights in 4 bits, groups of 64."""
    decoder = shop.variant("4bit", lambda: quantized(shop.decoder(), bits=4, group=64))
    return shop.engine(decoder)


def eight_bit_weights(shop: Workshop) -> Any:
    """Weights in 8 bits, one scale per row."""
    decoder = shop.variant("8bit", lambda: quantized(shop.decoder(), bits=8, group=None))
    return shop.engine(decoder)


def last_layers_skipped(shop: Workshop) -> Any:
    """Leaves out the last layer in eight (one at least)."""
    whole = shop.decoder()
    return shop.engine(shop.variant("skipped", lambda: without_last_layers(whole, max(1, len(whole.layers) // 8))))


def another_checkpoint(shop: Workshop) -> Any:
    """Weights as far from the agreed ones as a short fine-tuning: every weight moved by about 3 % of itself."""
    return shop.engine(shop.variant("perturbed", lambda: perturbed(shop.decoder(), relative=0.03, seed=0)))


def altered_prompt(shop: Workshop) -> Any:
    """Inserts an instruction of its own before the prompt."""
    inserted = shop.inserted_ids()
    return Altered(shop.engine(shop.decoder()), before=lambda prompts: [[*inserted, *prompt] for prompt in prompts])


def eight_bit_cache(shop: Workshop) -> Any:
    """Keeps keys and values in 8 bits, one scale per head and token."""
    return shop.engine(shop.decoder(), store=lambda x: round_to_bits(x, bits=8, group=None))


def flipped_sign(shop: Workshop) -> Any:
    """Commits to final activations of the other sign, from a model that gives the same tokens."""
    return shop.engine(shop.variant("mirrored", lambda: mirrored(shop.decoder())))


# ------------------------------------------------------------------------------------------------- another submission
Proofs = list[tuple[bytes, ...]]


class Edited(Altered):
    """An honest engine whose commitments are edited before they are submitted. `edit(answers, proofs)` is kept, so that
    it can be done to commitments of any other kind as well."""

    def __init__(self, shop: Workshop, edit: Callable[[Sequence[Any], Proofs], Proofs]) -> None:
        self.edit = edit
        super().__init__(shop.engine(shop.decoder()), after=lambda prompts, answers: self._edited(answers))

    def _edited(self, answers: list[Any]) -> list[Any]:
        edited = self.edit(answers, [answer.proofs for answer in answers])
        return [_with_proofs(answer, proofs) for answer, proofs in zip(answers, edited, strict=True)]


def too_few_proofs(shop: Workshop) -> Any:
    """Proves the first chunk and leaves the others out."""
    return Edited(shop, lambda answers, proofs: [own[:1] for own in proofs])


def null_proofs(shop: Workshop) -> Any:
    """Proofs of zero bytes, as the published library writes them after an error."""
    return Edited(shop, lambda answers, proofs: [tuple(bytes(len(proof)) for proof in own) for own in proofs])


def garbage_proofs(shop: Workshop) -> Any:
    """Random bytes of the right length."""

    def garbage(answer: Any, own: tuple[bytes, ...]) -> tuple[bytes, ...]:
        rng = np.random.default_rng(int(answer.tokens[0]))
        return tuple(rng.bytes(len(proof)) for proof in own)

    return Edited(shop, lambda answers, proofs: [garbage(*pair) for pair in zip(answers, proofs, strict=True)])


def copied_proofs(shop: Workshop) -> Any:
    """Each answer carries the proofs of its neighbour in the batch."""

    def rotate(answers: Sequence[Any], proofs: Proofs) -> Proofs:
        return [_fitted(donor, len(own)) for own, donor in zip(proofs, [*proofs[1:], proofs[0]], strict=True)]

    return Edited(shop, rotate)


class _CheapTokens:
    """A cheap model writes the tokens; the right one reads them once, and proves that."""

    def __init__(self, cheap: BoundEngine, right: BoundEngine, mode: Mode) -> None:
        self.cheap, self.right, self.mode = cheap, right, mode

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        answers = self.cheap.answer(prompts, seeds)
        replays = self.right.replay(prompts, [answer.tokens for answer in answers])
        return [proven(answer, replay.states, self.mode) for answer, replay in zip(answers, replays, strict=True)]

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        tokens = [len(prompt) + len(answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
        prefill = Forward(model=self.right.size, batch=len(tokens), new_tokens=round(sum(tokens) / len(tokens)))
        return Several((self.cheap.work(prompts, answers), prefill))


def cheap_tokens(shop: Workshop) -> Any:
    """Tokens by a model with every fourth layer's worth left out, activations by the right one."""
    whole = shop.decoder()
    cheap = shop.variant("cheap", lambda: without_last_layers(whole, max(1, len(whole.layers) // 4)))
    return _CheapTokens(shop.engine(cheap), shop.engine(whole), shop.agreement.proof_mode)


CHEATS: dict[str, Callable[[Workshop], Any]] = {
    "weights-4bit": four_bit_weights,
    "weights-8bit": eight_bit_weights,
    "layers-skipped": last_layers_skipped,
    "other-checkpoint": another_checkpoint,
    "prompt-altered": altered_prompt,
    "kv-8bit": eight_bit_cache,
    "sign-flipped": flipped_sign,
    "proofs-too-few": too_few_proofs,
    "proofs-null": null_proofs,
    "proofs-garbage": garbage_proofs,
    "proof-copied": copied_proofs,
    "cheap-tokens": cheap_tokens,
}


def proven(answer: Any, states: torch.Tensor, mode: Mode) -> Any:
    """`answer` with proofs of `states`, and with these states where it carries any."""
    proofs = tuple(proof.encode() for proof in build_proofs(states, mode=mode))
    return dataclasses.replace(answer, proofs=proofs, states=None if answer.states is None else states)


def _with_proofs(answer: Any, proofs: tuple[bytes, ...]) -> Any:
    return dataclasses.replace(answer, proofs=proofs)


def _fitted(proofs: tuple[bytes, ...], count: int) -> tuple[bytes, ...]:
    """`count` proofs, the last one repeated where there are too few."""
    return (proofs + proofs[-1:] * count)[:count]
