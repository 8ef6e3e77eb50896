"""Log-probability and entropy of the tokens that were sampled, without keeping a table of the whole vocabulary.

The logits of a training batch are its largest tensor by far (4096 tokens of a 49 152-word vocabulary: 0.8 GB in
float32, and as much again for their gradient). Only two numbers a token are wanted of them, so they are made in slices,
reduced at once, and made again in the backward pass; a few (`KEPT_CELLS`) are kept for it. Prompt tokens are not scored
at all.

The distribution is the one that was sampled from: logits divided by the temperature, and filtered by `keep` where the
engine filters (top-k, top-p). One convention everywhere: the log-probability at index i is *of token i*, given the
tokens before it; it is computed from the hidden state at i - 1.

Shapes: N scored tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KEPT_CELLS = 1 << 21  # 8 MiB in float32
Keep = Callable[[Tensor], Tensor]
"""scaled logits (N, V) -> bool (N, V), True for tokens that may be sampled. The sampled token is kept in any case."""


def logits_logprobs(
    logits_NV: Tensor, token_N: Tensor, temperature: float = 1.0, keep: Keep | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of each sampled token from existing logits; the plain twin of `head_logprobs`."""
    _check(temperature, logits_NV.shape[0], token_N)
    z_NV = _scaled(logits_NV, token_N, temperature, keep)
    log_total_N = torch.logsumexp(z_NV, dim=-1)
    logprob_N = z_NV.gather(-1, token_N[:, None]).squeeze(-1) - log_total_N  # log p = z - logsumexp(z)
    p_NV = torch.exp(z_NV - log_total_N[:, None])
    entropy_N = log_total_N - (p_NV * z_NV.masked_fill(z_NV == -torch.inf, 0.0)).sum(-1)  # H = logsumexp(z) - Σ p z
    return logprob_N, entropy_N


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    token_N: Tensor,
    temperature: float = 1.0,
    keep: Keep | None = None,
    slice_cells: int = 1 << 24,
) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of each sampled token from the last hidden state and the head's weights.

    Computed in float32 or wider. `slice_cells`: logits that exist at one time (2^24 float32 = 64 MiB;
    three such while gradients are made).
    """
    _check(temperature, hidden_ND.shape[0], token_N)
    rows = max(1, slice_cells // weight_VD.shape[0])
    logprob_N, entropy_N = _HeadLogprobs.apply(hidden_ND, weight_VD, token_N, temperature, keep, rows)
    return logprob_N, entropy_N


def _check(temperature: float, rows: int, token_N: Tensor) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected more than 0 (greedy decoding has no gradient)")
    if token_N.shape != (rows,) or token_N.dtype != torch.int64:
        raise ValueError(
            f"tokens are {token_N.dtype} of shape {tuple(token_N.shape)}, expected int64 of shape ({rows},)"
        )


def _scaled(logits_NV: Tensor, token_N: Tensor, temperature: float, keep: Keep | None) -> Tensor:
    z_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if temperature != 1.0:
        z_NV = z_NV / temperature
    if keep is None:
        return z_NV
    kept_NV = keep(z_NV.detach()).scatter(-1, token_N[:, None], True)
    return z_NV.masked_fill(~kept_NV, -torch.inf)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        token_N: Tensor,
        temperature: float,
        keep: Keep | None,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, totals = [], [], []
        logp_NV = None
        for start in range(0, hidden_ND.shape[0], rows):
            token_n = token_N[start : start + rows]
            z_nV = _scaled(hidden_ND[start : start + rows] @ weight_VD.T, token_n, temperature, keep)
            log_total_n = torch.logsumexp(z_nV, dim=-1)
            logprobs.append(z_nV.gather(-1, token_n[:, None]).squeeze(-1) - log_total_n)
            logp_nV = z_nV - log_total_n[:, None]
            if len(hidden_ND) <= rows and logp_nV.numel() <= KEPT_CELLS:
                logp_NV = logp_nV
            p_nV = logp_nV.exp()
            entropies.append(log_total_n - p_nV.mul_(z_nV.masked_fill_(z_nV == -torch.inf, 0.0)).sum(-1))
            totals.append(log_total_n)
        empty = [hidden_ND.new_zeros(0, dtype=torch.promote_types(hidden_ND.dtype, torch.float32))]
        logprob_N, entropy_N, log_total_N = (torch.cat(parts or empty) for parts in (logprobs, entropies, totals))
        ctx.save_for_backward(hidden_ND, weight_VD, token_N, log_total_N, entropy_N, logp_NV)
        ctx.temperature, ctx.keep, ctx.rows = temperature, keep, rows
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, token_N, log_total_N, entropy_N, kept_NV = ctx.saved_tensors
        grad_logprob_N = torch.zeros_like(log_total_N) if grads[0] is None else grads[0]
        grad_entropy_N = grads[1]  # None when the loss does not use the entropy, which saves a pass
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=log_total_N.dtype)
        for start in range(0, hidden_ND.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            hidden_nD, token_n = hidden_ND[part], token_N[part]
            if kept_NV is not None:
                logp_nV = kept_NV
            else:
                logp_nV = _scaled(hidden_nD @ weight_VD.T, token_n, ctx.temperature, ctx.keep) - log_total_N[part, None]
            # ∂log p(token)/∂z = onehot(token) - p;   ∂H/∂z = -p · (log p + H)
            grad_z_nV = logp_nV.exp()
            if grad_entropy_N is None:
                grad_z_nV *= -grad_logprob_N[part, None]
            else:
                slope_nV = logp_nV.masked_fill(logp_nV == -torch.inf, 0.0).add_(entropy_N[part, None])
                grad_z_nV *= -(slope_nV.mul_(grad_entropy_N[part, None]).add_(grad_logprob_N[part, None]))
            grad_z_nV.scatter_add_(-1, token_n[:, None], grad_logprob_N[part, None])
            grad_z_nV = grad_z_nV.div_(ctx.temperature).to(hidden_ND.dtype)
            grad_hidden_ND[part] = grad_z_nV @ weight_VD
            grad_weight_VD += grad_z_nV.T @ hidden_nD
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None, None
