"""Where engines are made and shared: one per kind, not one per node.

A `Workshop` knows the agreed model, task and sampling. It gives out the engine that an honest worker runs, the engine
that a validator replays with, the prompts behind problem ids, and variants of the model for those who would rather run
something else (`refimpl/attacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refimpl.engine import ProofSettings, TorchEngine
from refimpl.model.attention import AttentionKernel
from refimpl.model.sampler import Sampling
from refimpl.model.transformer import Decoder
from refimpl.model.weights import content_hash, load_decoder
from refimpl.tasks.prompts import PROMPTS, inserted_ids, prompt_ids
from refimpl.tokenizer import load_tokenizer
from refimpl.toploc.proof import Mode
from refimpl.work import Forward, Prove, Several, Work

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What everybody in the swarm is to run."""

    model_path: str
    dtype: str = "bfloat16"
    prompts: str = "instructions"  # a name in `refimpl.tasks.prompts`
    batch: int = 8  # problems per assignment, and sequences generated together
    answer_tokens_max: int = 64
    proof_mode: Mode = "strict"  # how proofs are built
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


class BoundEngine:
    """A `TorchEngine` with everything decided but the prompts: what a worker generates and a validator replays with."""

    def __init__(self, engine: TorchEngine, *, sampling: Sampling, answer_tokens_max: int, batch: int) -> None:
        self.engine, self.sampling = engine, sampling
        self.answer_tokens_max, self.batch = answer_tokens_max, batch
        self.size = engine.model.config.size(range(len(engine.model.layers)))

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Any]:
        """Completions of `prompts`, `batch` at a time."""
        answers: list[Any] = []
        for at in range(0, len(prompts), self.batch):
            answers += self.engine.generate(
                prompts[at : at + self.batch],
                sampling=self.sampling,
                seeds=seeds[at : at + self.batch],
                max_new_tokens=self.answer_tokens_max,
            )
        return answers

    def work(self, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> Work:
        """Prefill, as many decode steps as the longest answer of each batch took, and the proofs."""
        parts: list[Work] = []
        for at in range(0, len(prompts), self.batch):
            lengths = [len(prompt) for prompt in prompts[at : at + self.batch]]
            made = [len(answer.tokens) for answer in answers[at : at + self.batch]]
            prompt, steps = round(sum(lengths) / len(lengths)), max(made) - 1
            parts.append(Forward(model=self.size, batch=len(lengths), new_tokens=prompt))
            if steps > 0:
                alive = max(1, round(sum(made) / max(made)))
                parts.append(Forward(model=self.size, batch=alive, new_tokens=1, past_tokens=prompt, steps=steps))
            parts.append(Prove(tokens=sum(made), hidden=self.size.hidden))
        return Several(tuple(parts))

    def replay(self, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> list[Any]:
        """The right activations for answers that somebody else gave."""
        return self.engine.replay(prompts, answers)

    def replay_work(self, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> Work:
        """One prefill over prompts and answers."""
        tokens = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        mean = round(sum(tokens) / len(tokens))
        return Forward(model=self.size, batch=len(tokens), new_tokens=mean)


class Workshop:
    """Engines for one run, made when first asked for and kept."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.checkpoint = content_hash(agreement.model_path)
        self.tokenizer = load_tokenizer(agreement.model_path)
        self.sampling = Sampling(temperature=agreement.temperature, top_k=agreement.top_k, top_p=agreement.top_p)
        self.problems = PROMPTS[agreement.prompts]
        self._decoders: dict[str, Decoder] = {}
        self._engines: dict[str, Any] = {}
        self._prompts: dict[int, list[int]] = {}

    def inserted_ids(self) -> list[int]:
        """An instruction that nobody asked for, as a cheat may put before a prompt."""
        return inserted_ids(self.problems, self.tokenizer)

    # --------------------------------------------------------------------------------------------------- the model
    def decoder(self, dtype: str | None = None, attention: AttentionKernel = "sdpa") -> Decoder:
        """The agreed checkpoint; another dtype or attention kernel is honest noise."""
        key = dtype or self.agreement.dtype
        decoder = self.variant(key, lambda: load_decoder(self.agreement.model_path, dtype=DTYPES[key]))
        return decoder if attention == "sdpa" else decoder.with_attention(attention)

    def variant(self, name: str, make: Callable[[], Decoder]) -> Decoder:
        """A decoder that is made once for all who ask for `name`."""
        if name not in self._decoders:
            self._decoders[name] = make()
        return self._decoders[name]

    def engine(self, decoder: Decoder, *, batch: int | None = None, **options: Any) -> BoundEngine:
        """`decoder` behind this run's sampling, answer length and batch."""
        size = batch or self.agreement.batch
        proof = ProofSettings(mode=self.agreement.proof_mode)
        return BoundEngine(
            TorchEngine(decoder, name=self.agreement.model_path, proof=proof, batch_max=size, **options),
            sampling=self.sampling,
            answer_tokens_max=self.agreement.answer_tokens_max,
            batch=size,
        )

    def once(self, name: str, make: Callable[[Workshop], Any]) -> Any:
        """The engine called `name`, made when first asked for."""
        if name not in self._engines:
            self._engines[name] = make(self)
        return self._engines[name]

    # ------------------------------------------------------------------------------------------------- the problems
    @property
    def problem_count(self) -> int:
        return self.problems.count

    def prompt_of(self, problem_id: int) -> Sequence[int]:
        """Token ids of a problem's prompt."""
        if problem_id not in self._prompts:
            self._prompts[problem_id] = prompt_ids(self.problems, problem_id, self.tokenizer)
        return self._prompts[problem_id]
