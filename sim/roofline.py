"""Why: what a piece of work costs in arithmetic, memory traffic and memory held, before any device is named.

Pure arithmetic over `refimpl.work`: a device turns these quantities into seconds (`sim/hardware.py`). Everything is
derived from the model's sizes; no figure of one particular model is written down here (an often copied "131072 bytes
of KV cache per token" is Llama-3.1-8B's, and wrong for every other).

Legend: P weights that a token is multiplied with, b sequences in the batch, n new tokens of each, c tokens of each
already cached, H_q query heads, H_kv KV heads, d head width, L layers, E routed experts of which k serve a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor

from refimpl.work import Backward, Forward, ModelSize, Prove, Verify

FORWARD_FLOP_PER_WEIGHT = 2  # one multiplication, one addition
TRAINING_FORWARDS = 3  # forward 1, gradient of the activations 1, gradient of the weights 1
ADAM_STATE_BYTES_PER_WEIGHT = 12.0  # fp32: master copy 4, first moment 4, second moment 4
ACTIVATION_BYTES = 2.0  # bf16
PREFILL_CHUNK_TOKENS = 8192  # engines cut longer prefills into chunks, so activations stop growing there


@lru_cache(maxsize=1024)
def kv_bytes_per_token(model: ModelSize) -> float:
    """2·L·H_kv·d·bytes: keys and values only (queries are never cached), in the cache's own number format."""
    return float(model.kv_bytes_per_token)


def hop_bytes_per_token(model: ModelSize) -> float:
    """What one pipeline stage sends the next for one token: the hidden state and the residual stream, both bf16."""
    return 2 * model.hidden * ACTIVATION_BYTES


def experts_hit(experts: int, experts_active: int, tokens: int) -> float:
    """Expected number of distinct experts that `tokens` tokens use in a layer: E·(1 − (1 − k/E)^tokens), for
    independent uniform routing."""
    if experts == 0:
        return 0.0
    return float(experts * (1.0 - (1.0 - experts_active / experts) ** tokens))


@lru_cache(maxsize=65536)
def weight_bytes_read(model: ModelSize, tokens: int) -> float:
    """Bytes of weights that one pass over `tokens` tokens reads: all of a dense model, of a mixture only the experts
    hit. The embedding is a lookup of `tokens` rows and is left out."""
    per_layer = float(model.attention_weights_per_layer)
    if model.experts:
        distinct = experts_hit(model.experts, model.experts_active, tokens)
        per_layer += 3 * model.hidden * model.expert_intermediate * distinct + model.hidden * model.experts
    else:
        per_layer += 3 * model.hidden * model.intermediate
    return (model.layers * per_layer + model.head_weights) * model.bytes_per_weight


def activation_bytes_per_token(model: ModelSize) -> float:
    """Traffic of one token in one layer outside the products, two bytes a number: the stream is read and written by two
    norms and two sums (8·hidden), gate and up are read and their product written and read (4·intermediate)."""
    width = model.experts_active * model.expert_intermediate if model.experts else model.intermediate
    return (8 * model.hidden + 4 * width) * ACTIVATION_BYTES


@dataclass(frozen=True, slots=True)
class PassCost:
    """The quantities of `steps` equal passes; the attention part grows by a fixed amount from one step to the next."""

    tokens: int  # b·n, new tokens of one pass
    matmul_flop: float  # 2·P·b·n
    weight_bytes: float
    activation_bytes: float  # written and read between the products: norms, rotations, gates, sums
    attention_flop: float  # of the first step
    attention_flop_growth: float  # per step
    kv_bytes: float  # read and written in the first step
    kv_bytes_growth: float  # per step
    steps: int


def forward_cost(work: Forward) -> PassCost:
    """Quantities of a `Forward`. Causal attention: new token j of a sequence sees c + j + 1 keys, so the n of them see
    n·c + n(n+1)/2, at 4·d FLOP a key and query head (scores and values)."""
    model, b, n, c = work.model, work.batch, work.new_tokens, work.past_tokens
    tokens = b * n
    flop_per_key = 4 * model.layers * model.query_heads * model.head_dim
    kv = kv_bytes_per_token(model)
    return PassCost(
        tokens=tokens,
        matmul_flop=FORWARD_FLOP_PER_WEIGHT * _weights_active(model) * tokens,
        weight_bytes=weight_bytes_read(model, tokens),
        activation_bytes=tokens * model.layers * activation_bytes_per_token(model),
        attention_flop=flop_per_key * b * (n * c + n * (n + 1) / 2),
        attention_flop_growth=flop_per_key * b * n * n,
        kv_bytes=kv * b * (c + n),
        kv_bytes_growth=kv * b * n,
        steps=work.steps,
    )


@lru_cache(maxsize=1024)
def _weights_active(model: ModelSize) -> int:
    return model.weights_active


def sum_of_larger(a: float, a_growth: float, b: float, b_growth: float, count: int) -> float:
    """Σ_{i<count} max(a + i·a_growth, b + i·b_growth), in closed form: two lines cross at most once."""
    first, last = a - b, (a - b) + (a_growth - b_growth) * (count - 1)
    if first >= 0 and last >= 0:
        return sum_of_line(a, a_growth, 0, count)
    if first <= 0 and last <= 0:
        return sum_of_line(b, b_growth, 0, count)
    crossing = min(max(floor(-first / (a_growth - b_growth)) + 1, 0), count)  # steps before the lines change places
    if first > 0:
        return sum_of_line(a, a_growth, 0, crossing) + sum_of_line(b, b_growth, crossing, count)
    return sum_of_line(b, b_growth, 0, crossing) + sum_of_line(a, a_growth, crossing, count)


def sum_of_line(start: float, growth: float, begin: int, end: int) -> float:
    """Σ_{begin ≤ i < end} (start + i·growth)."""
    count = end - begin
    return count * start + growth * (count * (begin + end - 1) / 2)


def training_flop(work: Backward) -> float:
    """3·(2·P·tokens + attention): forward once, backward twice; no recomputation (it shows in the efficiency)."""
    model = work.model
    attention = 4 * model.layers * model.query_heads * model.head_dim * work.tokens * (work.sequence_tokens + 1) / 2
    return TRAINING_FORWARDS * (FORWARD_FLOP_PER_WEIGHT * _weights_active(model) * work.tokens + attention)


def optimizer_bytes(work: Backward) -> float:
    """Memory traffic of AdamW: gradient read, weight written, fp32 state read and written, for each optimizer step."""
    per_weight = 2 * work.model.bytes_per_weight + 2 * ADAM_STATE_BYTES_PER_WEIGHT
    return work.optimizer_steps * work.model.weights * per_weight


def proof_scan_bytes(work: Prove | Verify) -> float:
    """The activations looked through for the largest values: tokens·hidden numbers in bf16."""
    return work.tokens * work.hidden * ACTIVATION_BYTES


def proof_terms(work: Prove | Verify) -> float:
    """Field operations of the polynomials: one polynomial a chunk, top_k² terms to interpolate or to evaluate it."""
    return ceil(work.tokens / work.chunk_tokens) * work.top_k**2


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a piece of work holds on its device."""

    weights: float
    kv_cache: float = 0.0
    optimizer: float = 0.0  # gradients and AdamW state
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + self.optimizer + self.activations


def forward_memory(model: ModelSize, batch: int, tokens: int, new_tokens: int = 1) -> MemoryNeed:
    """Weights, and the cache of `batch` sequences grown to `tokens` each; activations of the largest intermediate of
    one layer for `new_tokens` of each, a chunk at most."""
    width = max(model.intermediate, model.hidden, model.experts_active * model.expert_intermediate)
    return MemoryNeed(
        weights=model.weight_bytes,
        kv_cache=batch * tokens * kv_bytes_per_token(model),
        activations=min(batch * new_tokens, PREFILL_CHUNK_TOKENS) * (2 * width + 2 * model.hidden) * ACTIVATION_BYTES,
    )


def backward_memory(work: Backward) -> MemoryNeed:
    """Weights, gradients and AdamW state; activations of one sequence with a checkpoint at each layer's input."""
    model = work.model
    return MemoryNeed(
        weights=model.weight_bytes,
        optimizer=model.weights * (model.bytes_per_weight + ADAM_STATE_BYTES_PER_WEIGHT),
        activations=min(work.tokens, work.sequence_tokens) * model.layers * model.hidden * ACTIVATION_BYTES,
    )
