"""A stage's arithmetic: its layers, its caches, and on the last stage the draw. [torch]

A pass runs over consecutive rows of one micro-batch's cache. Rows of unequal length are padded on the right, where no
token looks; only real tokens travel. In float32 and with equal batches the result is that of one process, bit for bit.

Shapes: n rows, T new tokens of the longest row, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from refimpl.model.attention import AttentionKernel
from refimpl.model.cache import KVCache
from refimpl.model.config import ModelConfig
from refimpl.model.transformer import Decoder
from refimpl.model.weights import content_hash, load_decoder
from refimpl.pipeline.blame import Commit
from refimpl.pipeline.charge import work_of
from refimpl.pipeline.formation import Parts
from refimpl.pipeline.messages import Member, RingPlan
from refimpl.pipeline.schedule import HeldRow, Pass
from refimpl.work import ModelSize, Work

if TYPE_CHECKING:
    from refimpl.model.sampler import Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Made:
    """What a pass gave: the activations of its new tokens, and on the last stage the tokens drawn."""

    states: np.ndarray  # [new tokens, D], as they travel; the last stage's are normed
    tokens: np.ndarray | None = None  # int32 [rows that draw]
    logprobs: np.ndarray | None = None  # float32 [rows that draw]


class StageCompute:
    """Layers `decoder.layer_range` with caches for `micro_batches` x `rows` sequences. `sampling`: how the last stage
    draws (None: the likeliest token). `dtype`: what activations travel in (None: the decoder's own); a stage that
    computes in another one is honest noise."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        micro_batches: int,
        rows: int,
        capacity_tokens: int,
        sampling: Sampling | None,
        dtype: str | None = None,
    ) -> None:
        self.decoder, self.sampling = decoder, sampling
        self.size: ModelSize = decoder.config.size(decoder.layer_range)
        self.caches: list[KVCache] = [
            decoder.new_cache(batch=rows, capacity=capacity_tokens) for _ in range(micro_batches)
        ]
        self.dtype = dtype or str(decoder.dtype).removeprefix("torch.")

    @property
    def memory_bytes(self) -> int:
        """Weights and caches."""
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.decoder.parameters())
        return weights + sum(cache.size_bytes for cache in self.caches)

    def reset(self) -> None:
        """Empty caches."""
        for cache in self.caches:
            cache.lengths[:] = 0

    def work(self, made: Pass) -> Work:
        """What a pass costs."""
        return work_of(made, self.size)

    @torch.inference_mode()
    def run(self, made: Pass, drawing: Sequence[HeldRow], states: np.ndarray | None) -> Made:
        """Do what the header says. `states`: the predecessor's activations; None on the first stage, whose rows carry
        their tokens. `drawing`: the rows that draw, as `StageRows.obey` gave them."""
        cache = self.caches[made.micro_batch]
        for source, target in made.moves:
            cache.move(source, target)
        if not made.rows:
            return Made(self._travel(torch.empty(0, self.decoder.config.hidden, dtype=self.decoder.dtype)))
        view = cache.rows(made.first_row, made.first_row + len(made.rows))
        view.lengths[:] = [row.past for row in made.rows]
        new = [row.new for row in made.rows]
        ragged = min(new) != max(new)
        hidden_nTD = self.decoder(self._inputs(made, states, new, ragged), view, new_lengths=new if ragged else None)
        if ragged:
            flat_D = torch.cat([hidden_TD[:count] for hidden_TD, count in zip(hidden_nTD, new, strict=True)])
        else:
            flat_D = hidden_nTD.flatten(0, 1)
        if not self.decoder.last:
            return Made(self._travel(flat_D))
        tokens, logprobs = self._draw(made, drawing, flat_D, new)
        return Made(self._travel(flat_D), tokens, logprobs)

    def _inputs(self, made: Pass, states: np.ndarray | None, new: list[int], ragged: bool) -> torch.Tensor:
        device, width = self.decoder.device, max(new)
        if states is None:
            if not ragged:
                return torch.tensor([row.tokens for row in made.rows], device=device)
            tokens_nT = torch.zeros(len(new), width, dtype=torch.int64)
            for at, row in enumerate(made.rows):
                tokens_nT[at, : row.new] = torch.tensor(row.tokens)
            return tokens_nT.to(device)
        flat_D = _tensor(states).to(device, self.decoder.dtype)
        if not ragged:
            return flat_D.view(len(new), width, -1)
        hidden_nTD = flat_D.new_zeros(len(new), width, flat_D.shape[1])
        for at, part in enumerate(flat_D.split(new)):
            hidden_nTD[at, : len(part)] = part
        return hidden_nTD

    def _draw(
        self, made: Pass, drawing: Sequence[HeldRow], flat_D: torch.Tensor, new: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        lasts = np.cumsum(new) - 1
        at = torch.tensor([int(last) for last, row in zip(lasts, made.rows, strict=True) if row.draws])
        if not len(at):
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        logits = self.decoder.logits(flat_D if len(at) == len(flat_D) else flat_D[at.to(flat_D.device)])
        if self.sampling is None:
            tokens, logprobs = likeliest(logits)
            return tokens.to("cpu", torch.int32).numpy(), logprobs.cpu().numpy()
        from refimpl.model.sampler import sample  # compiled, 130 MB with its compiler: only for who draws at random

        seeds = torch.tensor([row.seed for row in drawing], dtype=torch.int64)
        positions = torch.tensor([row.answered for row in drawing], dtype=torch.int64)
        tokens, logprobs = sample(logits, seeds.to(logits.device), positions.to(logits.device), self.sampling)
        return tokens.to("cpu", torch.int32).numpy(), logprobs.cpu().numpy()

    def _travel(self, flat_D: torch.Tensor) -> np.ndarray:
        flat_D = flat_D.detach().to("cpu", DTYPES[self.dtype]).contiguous()
        if flat_D.dtype == torch.bfloat16:
            return flat_D.view(torch.int16).numpy().view(np.uint16)
        return flat_D.numpy()


def likeliest(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `refimpl.model.sampler.sample` gives at temperature 0, without what that compiles: tokens, log-probabilities
    (float32)."""
    scores_BV = logits_BV.float()
    best_B, tokens_B = scores_BV.max(dim=-1)
    logprobs_B = best_B - scores_BV.logsumexp(dim=-1)
    if not bool(logprobs_B.isfinite().all()):
        raise ValueError("the logits have no finite log-softmax; expected numbers, none NaN or +inf")
    return tokens_B, logprobs_B


def _tensor(states: np.ndarray) -> torch.Tensor:
    """Activations as they travelled -> a tensor in their own dtype."""
    if states.dtype == np.uint16:
        return torch.from_numpy(states.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(states.copy())


def bytes_per_token(hidden: int, dtype: str) -> int:
    """Size of one token's activations on a link."""
    return hidden * (2 if dtype == "bfloat16" else 4)


def toploc_commit(hidden: int, dtype: str, *, chunk_tokens: int, top_k: int) -> Commit:
    """Commitment to one chunk's bytes: the TOPLOC proof of its activations, rounded to bfloat16 where they are not."""
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32

    def commit(data: bytes) -> bytes:
        from refimpl.toploc.proof import build_proofs  # compiled, 130 MB with its compiler: only where a ring is signed

        states_TD = torch.frombuffer(bytearray(data), dtype=kind).view(-1, hidden).to(torch.bfloat16)
        (proof,) = build_proofs(states_TD, chunk_tokens=chunk_tokens, top_k=top_k)
        return proof.encode()

    return commit


def torch_parts(
    path: str | Path,
    *,
    dtype: str = "bfloat16",
    wire: str | None = None,
    attention: AttentionKernel = "sdpa",
    device: str = "auto",
    change: Callable[[Decoder], Decoder] = lambda decoder: decoder,
    checkpoint: str | None = None,
) -> Parts:
    """What a stage is made of that runs the checkpoint folder `path`: only the layers of its seat are read.

    `wire`: what activations travel in (None: `dtype`). `change`: applied to the layers, by who runs others than agreed.
    `checkpoint`: the folder's content hash, where the caller knows it already (it takes a read of the whole model).
    """

    whole = ModelConfig.from_pretrained(path)

    def load(plan: RingPlan, member: Member) -> StageCompute:
        for field, theirs, ours in (("layers", plan.layers, whole.layers), ("hidden", plan.hidden, whole.hidden)):
            if theirs != ours:
                raise ValueError(f"{field}: the plan says {theirs}, the checkpoint {ours}")
        layers = range(member.first, member.end)
        decoder = load_decoder(path, layers=layers, dtype=DTYPES[dtype], device=device, attention=attention)
        return StageCompute(
            change(decoder),
            micro_batches=plan.micro_batches,
            rows=plan.rows,
            capacity_tokens=plan.capacity_tokens,
            sampling=_sampling(plan, whole.vocabulary) if member.end == plan.layers else None,
            dtype=wire,
        )

    def bytes_min(plan: RingPlan, member: Member) -> int:
        width = DTYPES[dtype].itemsize
        size = whole.size(range(member.first, min(member.end, whole.layers)), bytes_per_weight=width)
        numbers = 2 * whole.kv_heads * whole.head_dim * (member.end - member.first)  # keys and values of a token
        return int(size.weights) * width + plan.micro_batches * plan.rows * plan.capacity_tokens * numbers * width

    def commit(plan: RingPlan) -> Commit:
        return toploc_commit(plan.hidden, plan.dtype, chunk_tokens=plan.chunk_tokens, top_k=plan.top_k)

    return Parts(
        checkpoint=checkpoint or content_hash(path),
        load=load,
        commit=commit,
        bytes_min=bytes_min,
        vocabulary=whole.vocabulary,
    )


def _sampling(plan: RingPlan, vocabulary: int) -> Sampling | None:
    """How the last stage draws (None: greedily); tried out once, so that what is compiled on first use is compiled as
    the ring forms and not while the first tokens are waited for."""
    if plan.sampling_temperature == 0:
        return None
    from refimpl.model.sampler import Sampling, sample

    sampling = Sampling(temperature=plan.sampling_temperature, top_k=plan.sampling_top_k, top_p=plan.sampling_top_p)
    one = torch.zeros(1, dtype=torch.int64)
    sample(torch.zeros(1, vocabulary), one, one, sampling)
    return sampling
