"""The verifier's arithmetic: the right activations at every boundary, and one stage run on given bytes. [torch]

One prefill of the whole model over prompt and answer, cut where the ring is cut. Commitments are compared by the rule
of TOPLOC (`refimpl.toploc.check`); in a trial, where both sides' bytes are there, whole tensors are compared, because a
commitment says nothing about the numbers outside the top K.

A trial can cost an innocent its seat, so it is given every doubt: the stage's layers are run on its input in each
arithmetic (dtype x attention kernel) that a ring permits, until one of them gives what was sent. Against one replay
alone, honest noise and 4-bit weights overlap; `experiments/LOG.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from refimpl.model.attention import AttentionKernel
from refimpl.model.transformer import Decoder
from refimpl.model.weights import load_decoder
from refimpl.pipeline.blame import Commitment
from refimpl.pipeline.compute import DTYPES
from refimpl.toploc.check import PRESETS, Thresholds, verify_proofs
from refimpl.work import Forward, Work

Arithmetic = tuple[str, AttentionKernel]
"""(dtype, attention kernel)."""

KERNELS_PERMITTED: tuple[AttentionKernel, ...] = ("sdpa", "eager", "split")
ARITHMETICS: tuple[Arithmetic, ...] = tuple(product(("bfloat16", "float32"), KERNELS_PERMITTED))


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """How a ring's commitments are compared."""

    chunk_tokens: int = 32
    top_k: int = 128
    thresholds: Thresholds = PRESETS["paper"]
    permitted: tuple[Arithmetic, ...] = ARITHMETICS  # in which an honest stage may compute; tried in this order
    difference_max: float = 0.05  # in a trial, to the nearest permitted replay; see `difference`


class RingReplay:
    """Stages `cuts` of the checkpoint `path`, run one after another."""

    def __init__(
        self,
        path: str | Path,
        cuts: Sequence[int],
        *,
        wire_dtype: str,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "auto",
        settings: ReplaySettings | None = None,
    ) -> None:
        self.settings = settings or ReplaySettings()
        self.wire_dtype = torch.bfloat16 if wire_dtype == "bfloat16" else torch.float32
        self._path, self._device = path, device
        edges = (0, *cuts)
        self.stages: list[Decoder] = [
            load_decoder(path, layers=range(edges[at], edges[at + 1]), dtype=dtype, device=device)
            for at in range(len(cuts))
        ]

    def work(self, tokens: Sequence[int]) -> Work:
        """One prefill of the whole model."""
        return Forward(model=self.stages[0].config.size(), batch=1, new_tokens=len(tokens))

    @torch.inference_mode()
    def boundaries(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """bf16 [T, D] of each stage's output; the last is the normed state."""
        states = torch.tensor([list(tokens)], dtype=torch.int64, device=self.stages[0].device)
        right = []
        for stage in self.stages:
            states = stage(states)
            right.append(states[0].to(torch.bfloat16))
        return right

    def deviates(self, boundaries: list[torch.Tensor], stage: int, commitments: Sequence[Commitment]) -> list[bool]:
        """Chunk by chunk: is the commitment not within honest noise of the right activations?"""
        return [self._deviates(boundaries[stage], c) for c in commitments]

    def _deviates(self, states_TD: torch.Tensor, commitment: Commitment) -> bool:
        s = self.settings
        first = commitment.chunk * s.chunk_tokens
        chunk_TD = states_TD[first : first + s.chunk_tokens]
        if len(chunk_TD) != commitment.tokens:
            return True
        verdict = verify_proofs(
            chunk_TD, [commitment.commitment], thresholds=s.thresholds, chunk_tokens=s.chunk_tokens, top_k=s.top_k
        )
        return not verdict.accepted

    @torch.inference_mode()
    def follows(
        self, stage: int, tokens: Sequence[int], fed: bytes | None, sent: bytes | None, stated: Sequence[Commitment]
    ) -> bool:
        """Run one stage's layers on exactly what it was fed, in every permitted arithmetic until one gives what it sent
        (of the last stage: what it committed to)."""
        decoder = self.stages[stage]
        if fed is None:
            inputs = torch.tensor([list(tokens)], dtype=torch.int64, device=decoder.device)
        else:
            inputs = self._read(fed).to(decoder.device)[None]
            if inputs.shape[1] != len(tokens) or not bool(inputs.isfinite().all()):
                return True  # it was fed what nobody can compute on: not its fault
        return any(self._gives(right_TD, sent, stated) for right_TD in self._permitted(decoder, inputs))

    def _permitted(self, decoder: Decoder, inputs: torch.Tensor) -> Iterator[torch.Tensor]:
        """What these layers may honestly make of the inputs, [T, D]; the weights of one dtype at a time are held."""
        held, layers = decoder, decoder.layer_range
        for dtype, kernel in self.settings.permitted:
            if held.dtype != DTYPES[dtype]:
                held = load_decoder(self._path, layers=layers, dtype=DTYPES[dtype], device=self._device)
            yield held.with_attention(kernel)(inputs)[0]

    def _gives(self, right_TD: torch.Tensor, sent: bytes | None, stated: Sequence[Commitment]) -> bool:
        """Is this what was sent, or committed to?"""
        if sent is None:
            right = right_TD.to(torch.bfloat16)
            return not any(self._deviates(right, c) for c in stated)
        error = difference(self._read(sent).to(right_TD.device).float(), right_TD.float(), self.settings.chunk_tokens)
        return error <= self.settings.difference_max

    def _read(self, data: bytes) -> torch.Tensor:
        hidden = self.stages[0].config.hidden
        if self.wire_dtype == torch.bfloat16:
            bits = np.frombuffer(data, np.int16).copy()
            return torch.from_numpy(bits).view(torch.bfloat16).view(-1, hidden)
        return torch.from_numpy(np.frombuffer(data, np.float32).copy()).view(-1, hidden)


def difference(sent_TD: torch.Tensor, right_TD: torch.Tensor, chunk_tokens: int) -> float:
    """How far two outputs of one stage are apart: |sent - right| / |right| of each token, its mean over a chunk, the
    largest of all chunks. Not over the whole tensor: the first token of a text is often a hundred times as long as the
    others, and would be all that counts."""
    error_T = (sent_TD - right_TD).norm(dim=1) / right_TD.norm(dim=1).clamp_min(1e-30)
    return float(torch.stack([chunk_C.mean() for chunk_C in error_T.split(chunk_tokens)]).max())  # NaN stays NaN
