"""The decoder of the Llama family (Llama, Qwen2, Qwen3): the model that everybody in the swarm runs.

    h ← E[token]
    each layer:  h ← h + W_o · attention(rope(W_qkv · norm(h)))
                 h ← h + W_down · (silu(g) ⊙ u),   g, u = W_gu · norm(h)
    logits ← W_head · norm(h)

A `Decoder` may hold any contiguous range of layers. It has the embedding only if it starts at layer 0, and the final
norm and head only if it ends at the last layer: so one class is the whole model and every stage of a pipeline.

Matrices that read the same input are kept as one (q, k, v; gate and up): fewer, larger products.
`refimpl/model/weights.py` joins and cuts them when it reads and writes checkpoints.

Shapes: B batch, T new tokens, D hidden, H query heads, K key-value heads, N rows, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from refimpl.model.attention import KERNELS, AttentionKernel
from refimpl.model.cache import KVCache, Placement, Store
from refimpl.model.config import ModelConfig
from refimpl.model.rope import RopeTable, rotate

FEW_ROWS = 32  # tokens of one pass up to which `linear` turns bf16 products around


class Layer(nn.Module):
    """One block: attention, then SwiGLU, each on the normed stream and added to it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        D, c = config.hidden, config
        attended, turned = c.query_heads * c.head_dim, (c.query_heads + 2 * c.kv_heads) * c.head_dim
        self.config = config
        self.attention_norm = parameter(D)
        self.qkv = parameter(turned, D)
        self.qkv_bias = parameter(turned) if c.qkv_bias else None
        self.q_norm = parameter(c.head_dim) if c.qk_norm else None
        self.k_norm = parameter(c.head_dim) if c.qk_norm else None
        self.output = parameter(D, attended)
        self.output_bias = parameter(D) if c.output_bias else None
        self.mlp_norm = parameter(D)
        self.gate_up = parameter(2 * c.intermediate, D)
        self.gate_up_bias = parameter(2 * c.intermediate) if c.mlp_bias else None
        self.down = parameter(D, c.intermediate)
        self.down_bias = parameter(D) if c.mlp_bias else None

    def forward(self, hidden_BTD: torch.Tensor, step: Step, index: int) -> torch.Tensor:
        hidden_BTD = hidden_BTD + self._attention(hidden_BTD, step, index)
        x_BTD = rms_norm(hidden_BTD, self.mlp_norm, self.config.norm_eps)
        gate, up = linear(x_BTD, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return hidden_BTD + linear(F.silu(gate) * up, self.down, self.down_bias)

    def _attention(self, hidden_BTD: torch.Tensor, step: Step, index: int) -> torch.Tensor:
        c = self.config
        B, T, _ = hidden_BTD.shape
        x_BTD = rms_norm(hidden_BTD, self.attention_norm, c.norm_eps)
        qkv = linear(x_BTD, self.qkv, self.qkv_bias).view(B, T, -1, c.head_dim)
        qk, v_BTKD = qkv.split((c.query_heads + c.kv_heads, c.kv_heads), dim=2)  # one gradient each way, no zeros
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((c.query_heads, c.kv_heads), dim=2)
            qk = torch.cat((rms_norm(q, self.q_norm, c.norm_eps), rms_norm(k, self.k_norm, c.norm_eps)), dim=2)
        q_BTHD, k = rotate(qk, step.cos, step.sin).split((c.query_heads, c.kv_heads), dim=2)
        if step.cache is None:
            out = KERNELS[step.kernel](q_BTHD, k, v_BTKD, step.mask, step.mask is None)
        else:
            assert step.place is not None
            k, v_BTKD = step.cache.write(index, step.place, k, v_BTKD)
            out = KERNELS[step.kernel](q_BTHD, k, v_BTKD, step.place.mask, step.place.causal)
        return linear(out.reshape(B, T, -1), self.output, self.output_bias)


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one pass share."""

    kernel: AttentionKernel
    cos: torch.Tensor
    sin: torch.Tensor
    cache: KVCache | None = None
    place: Placement | None = None  # with a cache
    mask: torch.Tensor | None = None  # without one


class Decoder(nn.Module):
    """Layers `layers` of a model (all by default). Weights are uninitialised: see `refimpl.model.weights`.

    `attention` names the kernel; `with_attention` gives a second view of the same weights with another one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: range | None = None,
        attention: AttentionKernel = "sdpa",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        chosen = range(config.layers) if layers is None else layers
        if chosen.step != 1 or not 0 <= chosen.start < chosen.stop <= config.layers:
            raise ValueError(f"layers is {chosen}, expected a contiguous part of range(0, {config.layers}), not empty")
        if attention not in KERNELS:
            raise ValueError(f"attention is {attention!r}, expected one of {', '.join(KERNELS)}")
        self.config, self.layer_range, self.attention = config, chosen, attention
        self.first, self.last = chosen.start == 0, chosen.stop == config.layers

        def matrix() -> nn.Parameter:
            return nn.Parameter(torch.empty(config.vocabulary, config.hidden, dtype=dtype, device=device))

        self.embedding = matrix() if self.first else None
        self.layers = nn.ModuleList(Layer(config, dtype, device) for _ in chosen)
        self.norm = nn.Parameter(torch.empty(config.hidden, dtype=dtype, device=device)) if self.last else None
        if not self.last:
            self.head = None
        else:
            self.head = self.embedding if config.tied_head and self.first else matrix()
        self._rope = RopeTable(config)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def with_attention(self, attention: AttentionKernel) -> Decoder:
        """The same weights (not copied) behind another attention kernel."""
        if attention not in KERNELS:
            raise ValueError(f"attention is {attention!r}, expected one of {', '.join(KERNELS)}")
        twin = copy.copy(self)
        twin.attention = attention
        return twin

    def new_cache(self, *, batch: int, capacity: int, store: Store | None = None) -> KVCache:
        """An empty cache that fits these layers."""
        return KVCache(
            self.config,
            layers=len(self.layers),
            batch=batch,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
            store=store,
        )

    def forward(
        self,
        inputs: torch.Tensor,
        cache: KVCache | None = None,
        *,
        new_lengths: list[int] | None = None,
        positions_BT: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers over `inputs`: token ids [B, T] at layer 0, else hidden_BTD of the stage before.

        Returns hidden_BTD: normed if this decoder ends at the last layer (`logits` takes it from there), else as it
        leaves the last layer held.

        With a `cache`, the tokens follow what it holds. Rows shorter than T are padded on the right and `new_lengths`
        says how many tokens of each row count; no token ever sees padding, so what a row gives does not depend on it.
        Without a cache, each row is a text from its beginning; `positions_BT` and `mask` (bool [B, 1, T, T], true where
        attention is allowed) may override that for several texts packed in one row.
        """
        hidden_BTD = self._enter(inputs)
        step = self._step(hidden_BTD, cache, positions_BT, mask)
        for index, layer in enumerate(self.layers):
            hidden_BTD = layer(hidden_BTD, step, index)
        if cache is not None:
            cache.advance(hidden_BTD.shape[1] if new_lengths is None else new_lengths)
        return hidden_BTD if self.norm is None else rms_norm(hidden_BTD, self.norm, self.config.norm_eps)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, [..., V], from normed hidden states, [..., D]."""
        if self.head is None:
            raise ValueError(
                f"this decoder ends at layer {self.layer_range.stop} of {self.config.layers}: it has no head"
            )
        return linear(normed, self.head, None)

    def _enter(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            if inputs.dim() != 2 or inputs.is_floating_point():
                raise ValueError(f"inputs is {inputs.dtype} of shape {tuple(inputs.shape)}, expected token ids [B, T]")
            return F.embedding(inputs, self.embedding)
        if inputs.dim() != 3 or inputs.shape[-1] != self.config.hidden or not inputs.is_floating_point():
            raise ValueError(
                f"inputs is {inputs.dtype} of shape {tuple(inputs.shape)}, expected hidden states "
                f"[B, T, {self.config.hidden}]: this decoder starts at layer {self.layer_range.start}"
            )
        return inputs.to(self.dtype)

    def _step(
        self,
        hidden_BTD: torch.Tensor,
        cache: KVCache | None,
        positions_BT: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> Step:
        T, dtype, device = hidden_BTD.shape[1], hidden_BTD.dtype, hidden_BTD.device
        if cache is not None:
            if positions_BT is not None or mask is not None:
                raise ValueError("positions_BT and mask are for passes without a cache")
            place = cache.place(T, dtype)
            cos_PD, sin_PD = self._rope.table(place.position_max + 1, dtype, device)
            if place.even is not None:
                cos, sin = (t[None, place.even : place.even + T, None] for t in (cos_PD, sin_PD))
            else:
                cos, sin = (t[place.positions_BT].unsqueeze(2) for t in (cos_PD, sin_PD))
            return Step(self.attention, cos, sin, cache=cache, place=place)
        cos_PD, sin_PD = self._rope.table(T, dtype, device)
        if positions_BT is None:
            cos, sin = cos_PD[None, :T, None], sin_PD[None, :T, None]
        else:
            cos, sin = cos_PD[positions_BT].unsqueeze(2), sin_PD[positions_BT].unsqueeze(2)
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -math.inf)
        return Step(self.attention, cos, sin, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean x² + ε) ⊙ w over the last dimension, reduced in float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x Wᵀ + b.

    For a few bf16 rows on a CPU, (W xᵀ)ᵀ takes about 0.6 of the time of x Wᵀ in torch 2.13. The numbers are the same:
    both sum in float32 and round once.
    """
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS or rows == 0 or x.dtype != torch.bfloat16 or not x.is_cpu:
        return F.linear(x, weight, bias)
    x_ND = x.reshape(rows, x.shape[-1])
    out = torch.mv(weight, x_ND[0])[None] if rows == 1 else torch.mm(weight, x_ND.t()).t().contiguous()
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])
