"""Honest workers, and the honest noise between them: same weights, same prompts, other arithmetic.

A verifier that punishes one of these punishes somebody for the hardware they own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refimpl.workshop import Workshop


def as_agreed(shop: Workshop) -> Any:
    """The agreed dtype, batch and fused attention."""
    return shop.engine(shop.decoder())


def float32(shop: Workshop) -> Any:
    """Weights and activations in float32; what is committed to is rounded to bf16."""
    return shop.engine(shop.decoder(dtype="float32"))


def one_at_a_time(shop: Workshop) -> Any:
    """Batch 1: other matrix shapes, other order of summation."""
    return shop.engine(shop.decoder(), batch=1)


def eager_attention(shop: Workshop) -> Any:
    """Attention written out instead of fused."""
    return shop.engine(shop.decoder(attention="eager"))


def split_reductions(shop: Workshop) -> Any:
    """Attention reduced over pieces of the keys, as wide GPUs do."""
    return shop.engine(shop.decoder(attention="split"))


HONEST: dict[str, Callable[[Workshop], Any]] = {
    "honest": as_agreed,
    "honest-fp32": float32,
    "honest-batch1": one_at_a_time,
    "honest-eager": eager_attention,
    "honest-split": split_reductions,
}
