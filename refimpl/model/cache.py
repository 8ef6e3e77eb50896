"""Keys and values of the tokens so far: room taken once, rows of unequal length, rows that come and go.

Row r holds `lengths[r]` tokens from the left. New tokens are written in place; nothing is copied as a text grows. A
finished row is closed up by moving the last row into its place (one row is copied, not the batch), and a new text is
prefilled into a view of free rows.

Shapes: B rows, T new tokens, S keys in use, K key-value heads, D head dimension. One tensor per layer, kv_BC2KD: keys
in the first K heads, values in the last K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from refimpl.model.config import ModelConfig

Store = Callable[[torch.Tensor], torch.Tensor]
"""What becomes of keys and values as they are stored, e.g. rounding to 8 bits. Keeps shape and dtype."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the T new tokens of one pass go, and which keys they see: worked out once for all layers."""

    positions_BT: torch.Tensor
    position_max: int  # over the batch, of the new tokens
    keys: int  # S: keys that any row sees
    causal: bool  # no tokens before these: hide later keys without a mask
    mask: torch.Tensor | None  # [B, 1, T, S], 0 or −inf
    even: int | None  # all rows hold this many tokens: write a slice, not scattered places
    rows_B1: torch.Tensor | None


class KVCache:
    """Room for `batch` rows of up to `capacity` tokens through `layers` layers.

    `lengths` is the only state beside the tensors; to forget the newest tokens of a row, lower its entry.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: int,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        store: Store | None = None,
    ) -> None:
        shape = (batch, capacity, 2 * config.kv_heads, config.head_dim)
        self.kv = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.lengths = np.zeros(batch, dtype=np.int64)
        self.store = store
        self._kv_heads = config.kv_heads

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self.kv[0].shape[1]

    @property
    def size_bytes(self) -> int:
        return sum(kv.numel() * kv.element_size() for kv in self.kv)

    def rows(self, start: int, stop: int) -> KVCache:
        """A view of some rows: what is written through it, lengths too, is written here."""
        view = object.__new__(KVCache)
        view.kv = [kv[start:stop] for kv in self.kv]
        view.lengths = self.lengths[start:stop]
        view.store, view._kv_heads = self.store, self._kv_heads
        return view

    def move(self, source: int, target: int) -> None:
        """Row `target` becomes what row `source` is."""
        length = int(self.lengths[source])
        for kv in self.kv:
            kv[target, :length] = kv[source, :length]
        self.lengths[target] = length

    def place(self, new_tokens: int, dtype: torch.dtype) -> Placement:
        """Where `new_tokens` more tokens of every row go. Raises ValueError when they do not fit."""
        past_max = int(self.lengths.max())
        if past_max + new_tokens > self.capacity:
            raise ValueError(
                f"a row holds {past_max} tokens and {new_tokens} more were given, expected {self.capacity} at most"
            )
        device = self.kv[0].device
        past_B1 = torch.from_numpy(self.lengths.copy()).to(device)[:, None]
        positions_BT = past_B1 + torch.arange(new_tokens, device=device)
        keys = past_max + new_tokens
        even = past_max if bool((self.lengths == past_max).all()) else None
        mask = None
        if even is None or (past_max and new_tokens > 1):
            hidden = torch.arange(keys, device=device) > positions_BT[:, None, :, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
        rows_B1 = torch.arange(self.batch, device=device)[:, None] if even is None else None
        return Placement(positions_BT, keys - 1, keys, past_max == 0, mask, even, rows_B1)

    def write(
        self, layer: int, place: Placement, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's new keys and values; returns all that the new tokens may look at, k_BSKD and v_BSKD."""
        kv, K = self.kv[layer], self._kv_heads
        stored_k, stored_v = (k_BTKD, v_BTKD) if self.store is None else (self.store(k_BTKD), self.store(v_BTKD))
        if place.even is not None:
            span = slice(place.even, place.even + k_BTKD.shape[1])
            kv[:, span, :K], kv[:, span, K:] = stored_k, stored_v
        else:
            kv[place.rows_B1, place.positions_BT, :K] = stored_k
            kv[place.rows_B1, place.positions_BT, K:] = stored_v
        if place.causal:
            return k_BTKD, v_BTKD
        return kv[:, : place.keys, :K], kv[:, : place.keys, K:]

    def advance(self, new_tokens: int | Sequence[int]) -> None:
        """Count the tokens just written; of a row padded on the right, only its own."""
        self.lengths += np.asarray(new_tokens, dtype=np.int64)
