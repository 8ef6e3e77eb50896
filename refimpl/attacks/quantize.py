"""Rounding weights and caches to few bits, as somebody does who wants to run a smaller model than agreed.

Levels are symmetric, groups are along the input dimension. Weights that were themselves dequantised from 4 bits on
another grid (asymmetric, groups of 32) do not land on this one again.
"""

from __future__ import annotations

import copy

import torch

from refimpl.model.transformer import Decoder


def round_to_bits(x: torch.Tensor, *, bits: int, group: int | None) -> torch.Tensor:
    """x rounded to 2^bits − 1 symmetric levels, one scale per `group` numbers of the last dimension (None: per row).

    q = round(x / s) · s with s = max|x| / (2^(bits−1) − 1) over the group. Keeps shape and dtype.
    """
    size = x.shape[-1] if group is None else group
    if x.shape[-1] % size:
        size = x.shape[-1]  # a row that the group does not divide gets one scale
    levels = 2 ** (bits - 1) - 1
    parts = x.float().unflatten(-1, (-1, size))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / levels
    return ((parts / scale).round() * scale).flatten(-2).to(x.dtype)


def quantized(decoder: Decoder, *, bits: int, group: int | None) -> Decoder:
    """A copy of `decoder` whose layer matrices are rounded; embedding, head and norms stay, as is usual."""
    twin = copy.deepcopy(decoder)
    with torch.no_grad():
        for parameter in twin.layers.parameters():
            if parameter.dim() == 2:
                parameter.copy_(round_to_bits(parameter, bits=bits, group=group))
    return twin


def perturbed(decoder: Decoder, *, relative: float, seed: int) -> Decoder:
    """A copy whose layer matrices are w · (1 + relative · N(0, 1)): another checkpoint of the same family."""
    twin = copy.deepcopy(decoder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.layers.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.mul_(1 + relative * noise)
    return twin


def without_last_layers(decoder: Decoder, count: int) -> Decoder:
    """The same weights (not copied) with the last `count` layers left out."""
    if not 0 < count < len(decoder.layers):
        raise ValueError(f"{count} of {len(decoder.layers)} layers were to be skipped; at least one must stay and go")
    twin = _shallow(decoder)
    twin.layers = torch.nn.ModuleList(list(decoder.layers)[:-count])
    return twin


def mirrored(decoder: Decoder) -> Decoder:
    """The same function with final activations of the other sign: norm → −norm and head → −head give equal logits."""
    assert decoder.norm is not None and decoder.head is not None
    twin = _shallow(decoder)
    twin.norm = torch.nn.Parameter(-decoder.norm.detach(), requires_grad=False)
    twin.head = torch.nn.Parameter(-decoder.head.detach(), requires_grad=False)
    return twin


def _shallow(decoder: Decoder) -> Decoder:
    twin = copy.copy(decoder)
    twin._modules = dict(decoder._modules)
    twin._parameters = dict(decoder._parameters)
    return twin


def pruned(decoder: Decoder, *, keep: int, of: int) -> Decoder:
    """A copy in which of every `of` weights along the input only the `keep` largest stay (2 of 4: sparse hardware)."""
    twin = copy.deepcopy(decoder)
    with torch.no_grad():
        for parameter in twin.layers.parameters():
            if parameter.dim() == 2 and parameter.shape[1] % of == 0:
                parts = parameter.unflatten(-1, (-1, of))
                small = parts.abs().topk(of - keep, dim=-1, largest=False).indices
                parameter.copy_(parts.scatter(-1, small, 0.0).flatten(-2))
    return twin


def low_rank_moved(decoder: Decoder, *, rank: int, relative: float, seed: int) -> Decoder:
    """A copy with a low-rank part of `relative` of each matrix's length taken away: the base of an agreed adapter."""
    twin = copy.deepcopy(decoder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.layers.parameters():
            if parameter.dim() == 2:
                rows, columns = parameter.shape
                delta = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
                whole = parameter.float()
                parameter.copy_(whole - delta.to(whole) * (relative * whole.norm() / delta.norm()))
    return twin


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """x rounded to 8-bit floats (e4m3: 3 bits of mantissa), one scale per row of the last dimension."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


class _Rounded(torch.nn.Module):
    """A layer whose input is rounded to 8-bit floats."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_BTD: torch.Tensor, step: object, index: int) -> torch.Tensor:
        out: torch.Tensor = self.layer(round_to_fp8(hidden_BTD), step, index)
        return out


def with_fp8_activations(decoder: Decoder) -> Decoder:
    """The same weights (not copied); what goes from layer to layer is rounded to 8-bit floats."""
    twin = _shallow(decoder)
    twin.layers = torch.nn.ModuleList(_Rounded(layer) for layer in decoder.layers)
    return twin
