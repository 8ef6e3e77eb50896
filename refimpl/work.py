"""What `World.compute` is charged for: how much arithmetic and memory traffic a piece of work is.

A role says *what* it computes; the world says *how long* that takes. Real worlds measure it; the simulator prices it on
the node's device (`sim/hardware.py`). A `Work` therefore carries quantities, never seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The sizes of a decoder (or of some of its layers) that decide what a pass costs."""

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    bytes_per_weight: float = 2.0  # 2 for bf16, 0.5 for 4 bits
    bytes_per_kv: float = 2.0  # per cached number
    with_embedding: bool = True  # these layers include the token embedding
    with_head: bool = True  # these layers include the output head
    experts: int = 0  # routed experts of a mixture layer; 0: dense
    experts_active: int = 0  # routed experts that one token uses
    expert_intermediate: int = 0  # width of one expert

    @property
    def attention_weights_per_layer(self) -> int:
        queries, keys = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (queries + 2 * keys) + queries * self.hidden

    def _mlp_weights_per_layer(self, experts: int) -> int:
        if self.experts:
            return 3 * self.hidden * self.expert_intermediate * experts + self.hidden * self.experts
        return 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden if self.with_head else 0

    @property
    def weights(self) -> int:
        """All weights held, norms left out; an untied embedding counts beside the head."""
        body = self.layers * (self.attention_weights_per_layer + self._mlp_weights_per_layer(self.experts))
        return body + self.head_weights + (self.vocabulary * self.hidden if self.with_embedding else 0)

    @property
    def weights_active(self) -> int:
        """Weights that one token is multiplied with (the embedding is a lookup)."""
        body = self.layers * (self.attention_weights_per_layer + self._mlp_weights_per_layer(self.experts_active))
        return body + self.head_weights

    @property
    def weight_bytes(self) -> float:
        return self.weights * self.bytes_per_weight

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token over these layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_kv


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One pass of `new_tokens` tokens in each of `batch` sequences that already hold `past_tokens` each.

    Prefill: `past_tokens = 0`, `new_tokens` = prompt length. A whole decode: `steps` passes of one token each, with
    `past_tokens` the length before the first.
    """

    model: ModelSize
    batch: int
    new_tokens: int
    past_tokens: int = 0
    steps: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """Forward, backward and optimizer update over `tokens` tokens in sequences of mean length `sequence_tokens`."""

    model: ModelSize
    tokens: int
    sequence_tokens: int
    optimizer_steps: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prove:
    """Building TOPLOC proofs of `top_k` values over `tokens` activations of width `hidden`, `chunk_tokens` a proof."""

    tokens: int
    hidden: int
    top_k: int = 128
    chunk_tokens: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Checking TOPLOC proofs against activations that are already there (the replay itself is a `Forward`)."""

    tokens: int
    hidden: int
    top_k: int = 128
    chunk_tokens: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Hash:
    """SHA-256 over `size_bytes`."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Spread:
    """`pieces` pieces of work like `piece` that do not depend on each other, on the cores of the device's host."""

    piece: Hash
    pieces: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Work whose time is known: measured elsewhere, or not worth a model."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class Several:
    """Pieces of work done one after another and charged as one."""

    parts: tuple[Work, ...]


Work = Forward | Backward | Prove | Verify | Hash | Spread | Seconds | Several
