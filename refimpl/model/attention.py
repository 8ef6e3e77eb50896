"""Attention, three ways that agree but for rounding.

`sdpa` is torch's fused kernel, the fast one. `eager` writes the textbook out. `split` cuts the keys into pieces,
reduces each alone and joins them, as flash-decoding does on wide GPUs. Honest nodes differ in exactly this, so a
verifier's thresholds are measured over all three.

Shapes: B batch, T new tokens, S keys, H query heads, K key-value heads, G = H/K query heads per key head, D head
dimension. mask is [B, 1, T, S], added to the scores (0 or −inf).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

AttentionKernel = Literal["sdpa", "eager", "split"]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool], torch.Tensor]

KEYS_PER_SPLIT = 32


def sdpa(
    q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """Fused attention; out_BTHD. `causal` (only with T = S) hides later keys without a mask."""
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    k_BKSD, v_BKSD = k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    if T == 1:
        # One new token: the G query heads of a key head are G queries that see the same keys, so none are repeated.
        out_BKGD = F.scaled_dot_product_attention(q_BTHD.reshape(B, K, H // K, D), k_BKSD, v_BKSD, attn_mask=mask)
        return out_BKGD.reshape(B, 1, H, D)
    out_BHTD = F.scaled_dot_product_attention(
        q_BTHD.transpose(1, 2), k_BKSD, v_BKSD, attn_mask=mask, is_causal=causal, enable_gqa=H != K
    )
    return out_BHTD.transpose(1, 2)


def _scores(q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    B, T, H, D = q_BTHD.shape
    S, K = k_BSKD.shape[1:3]
    q_BKGTD = q_BTHD.view(B, T, K, H // K, D).permute(0, 2, 3, 1, 4)
    k_BK1DS = k_BSKD.permute(0, 2, 3, 1).unsqueeze(2)
    scores_BKGTS = (q_BKGTD @ k_BK1DS) / math.sqrt(D)
    if causal and T > 1:
        later_TS = torch.ones(T, S, dtype=torch.bool, device=q_BTHD.device).triu(1)
        return scores_BKGTS.masked_fill(later_TS, -math.inf)
    return scores_BKGTS if mask is None else scores_BKGTS + mask.unsqueeze(2)


def _heads_last(out_BKGTD: torch.Tensor) -> torch.Tensor:
    B, K, G, T, D = out_BKGTD.shape
    return out_BKGTD.permute(0, 3, 1, 2, 4).reshape(B, T, K * G, D)


def eager(
    q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """softmax(q·k / √D) v, one step after another: scores rounded to the model's dtype, softmax in float32."""
    scores = _scores(q_BTHD, k_BSKD, mask, causal)
    weights_BKGTS = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BTHD.dtype)
    return _heads_last(weights_BKGTS @ v_BSKD.transpose(1, 2).unsqueeze(2))


def split(
    q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """Each piece i of the keys gives m_i = max s, l_i = Σ e^(s−m_i), o_i = Σ e^(s−m_i) v; joined with m = max m_i:
    out = Σ e^(m_i−m) o_i / Σ e^(m_i−m) l_i."""
    scores = _scores(q_BTHD, k_BSKD, mask, causal).float()
    v_BK1SD = v_BSKD.transpose(1, 2).unsqueeze(2)
    m = scores.amax(-1, keepdim=True)
    total = torch.zeros_like(m)
    out = torch.zeros(*scores.shape[:-1], v_BSKD.shape[-1], dtype=torch.float32, device=scores.device)
    for start in range(0, scores.shape[-1], KEYS_PER_SPLIT):
        piece = scores[..., start : start + KEYS_PER_SPLIT]
        m_i = piece.amax(-1, keepdim=True)
        weights = torch.where(m_i == -math.inf, 0.0, torch.exp(piece - m_i))  # a piece that is hidden whole gives 0
        share = torch.where(m_i == -math.inf, 0.0, torch.exp(m_i - m))
        o_i = weights.to(q_BTHD.dtype) @ v_BK1SD[..., start : start + KEYS_PER_SPLIT, :]
        out = out + share * o_i
        total = total + share * weights.sum(-1, keepdim=True)
    return _heads_last((out / total).to(q_BTHD.dtype))


KERNELS: dict[AttentionKernel, Attend] = {"sdpa": sdpa, "eager": eager, "split": split}
