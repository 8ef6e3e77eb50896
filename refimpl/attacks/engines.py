"""Dishonest engines that are more than an edit before or after the honest one.

Each looks like a worker's engine from outside: `answer(prompts, seeds)` and `work(prompts, answers)`. Answers carry
proofs, and states where the workshop's engines keep them.

Shapes: B sequences, V vocabulary, D hidden, n tokens of one answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from refimpl.attacks.altered import Engine, Prompts
from refimpl.attacks.cheats import proven
from refimpl.engine import Completion
from refimpl.model.sampler import Sampling, cutoffs, sample, scale
from refimpl.toploc.proof import Mode, build_proofs
from refimpl.work import Forward, Prove, Several, Work
from refimpl.workshop import BoundEngine

BLOCK = 4
"""Tokens that a draft model writes before the right one looks at them."""


class Priced:
    """`engine`, whose work is that of an implementation that reads fewer bytes: what is rounded here is stored as it
    was, and would save nothing."""

    def __init__(self, engine: Engine, *, bytes_per_weight: float, bytes_per_kv: float) -> None:
        self.engine = engine
        self._bytes: dict[str, Any] = {"bytes_per_weight": bytes_per_weight, "bytes_per_kv": bytes_per_kv}

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        return self.engine.answer(prompts, seeds)

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        return self._priced(self.engine.work(prompts, answers))

    def _priced(self, work: Work) -> Work:
        if isinstance(work, Several):
            return Several(tuple(self._priced(part) for part in work.parts))
        if isinstance(work, Forward):
            return dataclasses.replace(work, model=dataclasses.replace(work.model, **self._bytes))
        return work


class OtherSampling:
    """The right model with another rule of sampling, or other seeds than were given."""

    def __init__(
        self, engine: BoundEngine, *, sampling: Sampling | None = None, seed: Callable[[int], int] = lambda seed: seed
    ) -> None:
        self.engine, self._seed = engine, seed
        engine.sampling = sampling or engine.sampling

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        return self.engine.answer(prompts, [self._seed(seed) for seed in seeds])

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        return self.engine.work(prompts, answers)


class BestOf:
    """Several answers by several seeds; the one that the model likes best is handed in, under the seed that was due.
    Where that is the due seed's own, nobody was cheated."""

    def __init__(self, engine: BoundEngine, tries: int) -> None:
        self.engine, self.tries = engine, tries
        self.cheated: list[bool] = []

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        rounds = [self.engine.answer(prompts, [seed + 7919 * k for seed in seeds]) for k in range(self.tries)]
        best = [max(tries, key=lambda answer: float(answer.logprobs.mean())) for tries in zip(*rounds, strict=True)]
        self.cheated = [not np.array_equal(one.tokens, due.tokens) for one, due in zip(best, rounds[0], strict=True)]
        return best

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        return Several((self.engine.work(prompts, answers),) * self.tries)


class Prefilled:
    """Tokens from `write` (honest answers are made first only if `after_honest`), read once by the right model.
    `cheated` says which of the last call's texts are not the honest ones."""

    def __init__(
        self,
        right: BoundEngine,
        mode: Mode,
        write: Callable[[Prompts, list[Any]], list[np.ndarray]],
        after_honest: bool,
    ) -> None:
        self.right, self.mode, self._write, self._after_honest = right, mode, write, after_honest
        self.cheated: list[bool] = []

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        honest = self.right.answer(prompts, seeds) if self._after_honest else []
        texts = self._write(prompts, honest)
        self.cheated = [not np.array_equal(text, due.tokens) for text, due in zip(texts, honest, strict=False)]
        self.cheated += [True] * (len(texts) - len(honest))
        answers = []
        for replay, text in zip(self.right.replay(prompts, texts), texts, strict=True):
            bare = Completion(
                tokens=text.astype(np.int32),
                logprobs=replay.logprobs().float().cpu().numpy(),
                proofs=(),
                finished="length",
                states=replay.states,
            )
            answer = proven(bare, replay.states, self.mode)
            answers.append(answer if self.right.engine.keep_states else dataclasses.replace(answer, states=None))
        return answers

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        """One prefill; where honest answers came first, about three quarters of their decoding too."""
        tokens = [len(prompt) + len(answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
        prefill = Forward(model=self.right.size, batch=len(tokens), new_tokens=round(sum(tokens) / len(tokens)))
        if not self._after_honest:
            return prefill
        short = [
            dataclasses.replace(answer, tokens=answer.tokens[: -(-3 * len(answer.tokens) // 4)]) for answer in answers
        ]
        return Several((self.right.work(prompts, short), prefill))


class Mixed:
    """Honest for some sequences, not for others. `cheated` says for which of the last call it was not."""

    def __init__(
        self, honest: Engine, cheat: Engine, when: Callable[[Sequence[int], list[Any]], list[bool]], whole: int = 0
    ) -> None:
        """`when(seeds, the cheat's answers)` says where it cheats."""
        self.honest, self.cheat, self._when = honest, cheat, when
        self.cheated: list[bool] = []

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        right, wrong = self.honest.answer(prompts, seeds), self.cheat.answer(prompts, seeds)
        self.cheated = self._when(seeds, wrong)
        return [w if cheats else r for r, w, cheats in zip(right, wrong, self.cheated, strict=True)]

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        """Each kind's share of a whole batch: over many batches, answers of one kind are written together."""
        share = sum(self.cheated) / max(1, len(self.cheated))
        parts = ((self.honest, 1.0 - share), (self.cheat, share))
        return Several(tuple(_part(engine.work(prompts, answers), part) for engine, part in parts if part > 0))


def _part(work: Work, share: float) -> Work:
    """A share of `work`: of a prefill's tokens, of decoding's steps."""
    if isinstance(work, Several):
        return Several(tuple(_part(one, share) for one in work.parts))
    if isinstance(work, Forward) and work.steps > 1:
        return dataclasses.replace(work, steps=max(1, round(share * work.steps)))
    if isinstance(work, Forward):
        return dataclasses.replace(work, new_tokens=max(1, round(share * work.new_tokens)))
    return dataclasses.replace(work, tokens=max(1, round(share * work.tokens))) if isinstance(work, Prove) else work


# ------------------------------------------------------------------------------------------- two models, step by step
Choice = tuple[torch.Tensor, torch.Tensor]
"""(the next token of each sequence, int64 [B]; whether the cheap model's work stands for it, bool [B])"""

Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Sampling], Choice]
"""(right logits [B, V], cheap logits [B, V], seeds [B], step, sampling) -> the choice."""


def in_the_tail(share: float, tokens_max: int) -> Choose:
    """The cheap model takes over after a `share` of the longest answer; seeds are respected throughout."""
    start = int(share * tokens_max)

    def choose(
        right_BV: torch.Tensor, cheap_BV: torch.Tensor, seeds_B: torch.Tensor, step: int, sampling: Sampling
    ) -> Choice:
        logits_BV = right_BV if step < start else cheap_BV
        tokens_B, _ = sample(logits_BV, seeds_B, torch.full_like(seeds_B, step), sampling)
        return tokens_B, torch.full(seeds_B.shape, step >= start)

    return choose


def uncorrected(
    right_BV: torch.Tensor, cheap_BV: torch.Tensor, seeds_B: torch.Tensor, step: int, sampling: Sampling
) -> Choice:
    """The draft's token stands if the right model finds it at least a tenth as likely as its own favourite."""
    places_B = torch.full_like(seeds_B, step)
    drafted_B, _ = sample(cheap_BV, seeds_B, places_B, sampling)
    own_B, _ = sample(right_BV, seeds_B, places_B, sampling)
    p_BV = right_BV.softmax(-1)
    stands_B = p_BV.gather(1, drafted_B[:, None])[:, 0] >= 0.1 * p_BV.amax(-1)
    return torch.where(stands_B, drafted_B, own_B), stands_B


def corrected(
    right_BV: torch.Tensor, cheap_BV: torch.Tensor, seeds_B: torch.Tensor, step: int, sampling: Sampling
) -> Choice:
    """Speculative sampling as published: y ~ q stands with probability min(1, p/q), else y ~ max(p - q, 0). The right
    distribution exactly, by the prover's own chance instead of the seed's. Reference: arXiv 2211.17192."""
    chance = torch.Generator().manual_seed(int(seeds_B[0]) * 1_000_003 + step)
    p_BV, q_BV = processed(right_BV, sampling), processed(cheap_BV, sampling)
    drafted_B1 = torch.multinomial(q_BV, 1, generator=chance)
    ratio_B = (p_BV.gather(1, drafted_B1) / q_BV.gather(1, drafted_B1))[:, 0]
    stands_B = torch.rand(len(ratio_B), generator=chance) < ratio_B
    rest_BV = (p_BV - q_BV).clamp(min=0)
    rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)
    other_B = torch.multinomial(rest_BV, 1, generator=chance)[:, 0]
    return torch.where(stands_B, drafted_B1[:, 0], other_B), stands_B


def processed(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that `sampling` draws from, float32 [B, V]."""
    scaled_BV = scale(logits_BV, sampling)
    cut_B = cutoffs(scaled_BV, sampling)
    return scaled_BV.masked_fill(scaled_BV < cut_B[:, None], -torch.inf).softmax(-1)


class LockStep:
    """A right and a cheap model read the same text; `choose` says after each step which token comes next.

    A real draft runs ahead by a block. Token by token gives the same text, since whether a token stands depends only
    on what comes before it; `work` counts what the blocks would cost. `cheated` says which of the last call's answers
    hold a token that the cheap model's work stands for.
    """

    def __init__(
        self, right: BoundEngine, cheap: BoundEngine, mode: Mode, choose: Choose, *, commits_right: bool, drafts: bool
    ) -> None:
        """`commits_right`: commits to the right model's states always, else to those of the model that chose.
        `drafts`: the right model reads what the cheap one wrote; else it rests while the cheap one writes."""
        self.right, self.cheap, self.mode, self._choose = right, cheap, mode, choose
        self._commits_right, self._drafts = commits_right, drafts
        self._stood = 0.0  # share of the last call's tokens
        self.cheated: list[bool] = []

    def answer(self, prompts: Prompts, seeds: Sequence[int]) -> list[Any]:
        answers: list[Any] = []
        stood: list[float] = []
        self.cheated = []
        for at in range(0, len(prompts), self.right.batch):
            made, share = self._batch(prompts[at : at + self.right.batch], seeds[at : at + self.right.batch])
            answers += made
            stood.append(share)
        self._stood = float(np.mean(stood)) if stood else 0.0
        return answers

    @torch.inference_mode()
    def _batch(self, prompts: Prompts, seeds: Sequence[int]) -> tuple[list[Any], float]:
        models = (self.right.engine, self.cheap.engine)
        steps = self.right.answer_tokens_max
        capacity = max(map(len, prompts)) + steps
        caches = [engine.model.new_cache(batch=len(prompts), capacity=capacity) for engine in models]
        states = [engine.prefill(cache, prompts) for engine, cache in zip(models, caches, strict=True)]
        seeds_B = torch.tensor([int(seed) for seed in seeds], dtype=torch.int64)
        tokens, committed, cheaply, logprobs = [], [], [], []
        for step in range(steps):
            right_BV, cheap_BV = (e.model.logits(s).float() for e, s in zip(models, states, strict=True))
            token_B, stands_B = self._choose(right_BV, cheap_BV, seeds_B, step, self.right.sampling)
            own = self._commits_right or not bool(stands_B.all())
            committed.append((states[0] if own else states[1]).to(torch.bfloat16))
            tokens.append(token_B)
            cheaply.append(stands_B)
            logprobs.append(right_BV.log_softmax(-1).gather(1, token_B[:, None])[:, 0])
            states = [engine.model(token_B[:, None], cache)[:, 0] for engine, cache in zip(models, caches, strict=True)]
        columns = (torch.stack(part, 1) for part in (tokens, committed, logprobs))
        made = [self._completion(*rows) for rows in zip(*columns, strict=True)]
        stands_Bn = torch.stack(cheaply, 1)
        self.cheated += [bool(row[: len(one.tokens)].any()) for row, one in zip(stands_Bn, made, strict=True)]
        return made, float(stands_Bn.float().mean())

    def _completion(self, tokens_n: torch.Tensor, states_nD: torch.Tensor, logprobs_n: torch.Tensor) -> Completion:
        ends = [i for i, token in enumerate(tokens_n.tolist()) if token in self.right.engine.model.config.eos_ids]
        count = ends[0] + 1 if ends else len(tokens_n)
        with torch.inference_mode(False):
            states_nD = states_nD[:count].clone()
        return Completion(
            tokens=tokens_n[:count].numpy().astype(np.int32),
            logprobs=logprobs_n[:count].numpy(),
            proofs=tuple(proof.encode() for proof in build_proofs(states_nD, mode=self.mode)),
            finished="eos" if ends else "length",
            states=states_nD if self.right.engine.keep_states else None,
        )

    def work(self, prompts: Prompts, answers: Sequence[Any]) -> Work:
        made = [len(answer.tokens) for answer in answers]
        prompt, count, past = round(np.mean([len(p) for p in prompts])), round(np.mean(made)), len(prompts)
        cheap_steps = count if self._drafts else round(count * self._stood)
        right_steps = count * (1 - self._stood)  # one pass for each token that did not stand
        parts: list[Work] = [
            Forward(model=size, batch=past, new_tokens=prompt) for size in (self.right.size, self.cheap.size)
        ]
        if self._drafts:  # and one for each block of those that did
            right_steps += count * self._stood / BLOCK
        for size, steps, new in (
            (self.cheap.size, cheap_steps, 1),
            (self.right.size, round(right_steps), BLOCK if self._drafts else 1),
        ):
            if steps:
                parts.append(Forward(model=size, batch=past, new_tokens=new, past_tokens=prompt, steps=steps))
        return Several((*parts, Prove(tokens=sum(made), hidden=self.right.size.hidden)))
