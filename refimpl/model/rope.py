"""Rotary position embedding with the stretchings that the Llama family uses.

Each pair of dimensions (j, j + D/2) of a head is turned by the angle position × frequency_j, so that q·k depends on the
distance of two tokens only. Long-context checkpoints lower some frequencies; each rule below is its paper's.

Shapes: B batch, T new tokens, P positions in the table, D head dimension.

Differs from transformers: 1) `dynamic` serves texts up to `max_position_embeddings`, where it changes nothing, and
refuses longer ones: there the frequencies follow the longest text of the batch, so a text's states would depend on its
neighbours, which no verifier could replay.
"""

from __future__ import annotations

import math

import torch

from refimpl.model.config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each of the D/2 pairs (float32), and the factor on cos and sin."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = 1.0 / (rope.theta**exponent)  # θ_j = base^(−2j/D)
    if rope.kind == "linear":
        return frequency / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequency), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequency, head_dim), _yarn_attention_factor(rope)
    return frequency, 1.0


def _llama3(rope: RopeConfig, frequency: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched in full, short ones not at all, those between by a linear blend."""
    wavelength = 2 * math.pi / frequency
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    smooth = (rope.positions_original / wavelength - low) / (high - low)
    blend = (1 - smooth) * frequency / rope.factor + smooth * frequency
    stretched = torch.where(wavelength > rope.positions_original / low, frequency / rope.factor, blend)
    return torch.where(wavelength < rope.positions_original / high, frequency, stretched)


def _yarn(rope: RopeConfig, frequency: torch.Tensor, head_dim: int) -> torch.Tensor:
    """NTK by parts (Peng et al. 2023, section 3.2): a ramp over dimensions from left alone to stretched in full."""

    def dimension_of(rotations: float) -> float:
        # the dimension that turns `rotations` times over the original context
        turns = rope.positions_original / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequency / rope.factor * ramp + frequency * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


class RopeTable:
    """cos and sin of every position seen so far, made once per dtype and device and grown by doubling."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._frequency, self._factor = inverse_frequencies(config.rope, config.head_dim)
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def table(self, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos_PD and sin_PD for at least `positions` positions; sin carries the sign that `rotate` wants."""
        if self._config.rope.kind == "dynamic" and positions > self._config.positions_max:
            raise ValueError(
                f"text of {positions} tokens, expected at most {self._config.positions_max}: beyond that, dynamic RoPE "
                f"depends on the other texts of the batch"
            )
        found = self._tables.get((dtype, device))
        if found is None or found[0].shape[0] < positions:
            rows = max(128, 1 << (positions - 1).bit_length())
            with torch.inference_mode(False):  # a table made while generating must serve training too
                angle_PD = torch.arange(rows, dtype=torch.float32)[:, None] * self._frequency.repeat(2)
                sign_D = torch.ones(self._config.head_dim)
                sign_D[: self._config.head_dim // 2] = -1.0
                cos_PD, sin_PD = angle_PD.cos() * self._factor, angle_PD.sin() * self._factor * sign_D
                found = cos_PD.to(device, dtype), sin_PD.to(device, dtype)
            self._tables[dtype, device] = found
        return found


def rotate(x_BTHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of dimensions: (x, y) → (x cos − y sin, y cos + x sin); the sign of the first half is in `sin`.

    Not `addcmul`: its fused rounding moves SmolLM2's logits 1e-4 off transformers', and these are the same bits.
    """
    return x_BTHD * cos + x_BTHD.roll(x_BTHD.shape[-1] // 2, -1) * sin
