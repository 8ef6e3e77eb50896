"""Many answers in one row, so that no compute is spent on padding, and none of them sees another.

Answers of a batch differ in length by tens of times; padded to the longest, most of the batch would be padding. So
they are laid end to end in rows of equal capacity. A border between two of them is a border for attention (a block
mask), for positions (each starts at 0) and for labels (the first token of a prompt has no prediction). Packed equals
unpacked: the tests hold log-probabilities and gradients to it.

Differs from the original (prime-rl, April 2025):
1) a rank with fewer rows than another gets rows of padding without loss; there it trains its first row again, so some
   tokens counted twice;
2) answers longer than a row are cut only on request, and the cut ones are counted.

One convention for all token tensors: index t speaks of token t, given those before it. The prediction of token t is
made by the hidden state at t - 1.

Shapes: B rows, T cells of a row (its capacity, or what the fullest row needs), N scored tokens, D hidden.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refimpl.grpo.loss import BatchTotals

PADDING = -1  # the segment of cells that hold no sample


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainSample:
    """One answer, ready for training."""

    prompt: npt.NDArray[np.int32]  # at least one token
    answer: npt.NDArray[np.int32]  # at least one token, as sampled: up to and including the end token
    behaviour: npt.NDArray[np.float32]  # log-probability of each answer token, as the engine reported it
    advantage: float

    def __post_init__(self) -> None:
        for name in ("prompt", "answer"):
            tokens = getattr(self, name)
            if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
                raise ValueError(f"{name} is {tokens.dtype} of shape {tokens.shape}, expected one token or more")
        if self.behaviour.shape != self.answer.shape:
            raise ValueError(f"{len(self.behaviour)} behaviour log-probabilities for {len(self.answer)} answer tokens")

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def answer_length(tokens: Sequence[int] | npt.NDArray[np.integer], end_ids: Collection[int]) -> int:
    """Tokens up to and including the first end token; all of them where there is none (the answer was cut)."""
    for index, token in enumerate(tokens):
        if int(token) in end_ids:
            return index + 1
    return len(tokens)


def cut(samples: Sequence[TrainSample], capacity: int) -> tuple[list[TrainSample], int]:
    """(samples no longer than `capacity`, how many were cut). Raises ValueError where a prompt alone fills a row."""
    kept = []
    for sample in samples:
        room = capacity - len(sample.prompt)
        if room < 1:
            raise ValueError(f"a prompt of {len(sample.prompt)} tokens leaves no room in a row of {capacity}")
        kept.append(
            TrainSample(
                prompt=sample.prompt,
                answer=sample.answer[:room],
                behaviour=sample.behaviour[:room],
                advantage=sample.advantage,
            )
        )
    return kept, sum(len(sample) > capacity for sample in samples)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows as lists of sample indices: longest first, each into the first row that has room (equal lengths in order).

    Never needs more than 11/9 of the fewest rows possible, plus one.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit a row of {capacity}: cut it first")
    rows: list[list[int]] = []
    room = np.zeros(max(len(lengths), 1), dtype=np.int64)  # free cells of each row opened, 0 beyond
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = room[: len(rows)] >= lengths[index]
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = capacity
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def share_rows(rows: Sequence[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Rows for each rank, all ranks the same number (sharded models must run in step): the most expensive row first, to
    the rank with the least to do. What is missing is filled with empty rows, which train nothing.

    A row costs the square of each of its samples' lengths in attention, and its tokens in all else; tokens decide here,
    then squares.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, expected 1 or more")
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    most = -(-len(rows) // ranks)
    queue = [(0, 0, rank) for rank in range(ranks)]
    costs = [(sum(lengths[i] for i in row), sum(lengths[i] ** 2 for i in row)) for row in rows]
    for number in sorted(range(len(rows)), key=lambda n: costs[n], reverse=True):
        tokens, squares, rank = heapq.heappop(queue)
        shares[rank].append(list(rows[number]))
        if len(shares[rank]) < most:
            heapq.heappush(queue, (tokens + costs[number][0], squares + costs[number][1], rank))
    for share in shares:
        share.extend([] for _ in range(most - len(share)))
    return shares


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """Rows of samples as tensors. All are (B, T)."""

    token_BT: Tensor  # int64
    position_BT: Tensor  # int64, from 0 in each sample and in the padding
    segment_BT: Tensor  # int64, index of the sample a cell belongs to, or PADDING
    mask_BT: Tensor  # bool, answer tokens
    behaviour_BT: Tensor  # float32, 0 outside the mask
    advantage_BT: Tensor  # float32, 0 outside the mask
    spans: tuple[tuple[int, int, int, int], ...]  # (row, first answer cell, end, sample index) of each sample

    @property
    def samples(self) -> int:
        return len(self.spans)

    @property
    def one_sample_a_row(self) -> bool:
        """True: every row is a text from its beginning, and plain causal attention serves (padding lies behind it)."""
        return bool((self.segment_BT == torch.where(self.segment_BT == PADDING, PADDING, self.segment_BT[:, :1])).all())

    def attention_B1TT(self) -> Tensor | None:
        """Bool, true where cell t may attend to cell s: the same sample, and not later. None: plain causal will do.

        Padding attends to padding, so no row of the softmax is empty.
        """
        if self.one_sample_a_row:
            return None
        same_BTT = self.segment_BT[:, :, None] == self.segment_BT[:, None, :]
        return same_BTT.tril_().unsqueeze(1)

    def totals(self) -> BatchTotals:
        return BatchTotals(tokens=int(self.mask_BT.sum()), sequences=self.samples, cells=self.mask_BT.numel())

    def predicting(self, hidden_BTD: Tensor) -> Tensor:
        """The hidden state that predicts each scored token, hidden_ND: the one before it."""
        return hidden_BTD[:, :-1][self.mask_BT[:, 1:]]

    def scored(self, value_BT: Tensor) -> Tensor:
        """The values of the scored tokens, (N,), in the order of `predicting`."""
        return value_BT[:, 1:][self.mask_BT[:, 1:]]

    def lay(self, values: Sequence[npt.NDArray[np.float32]]) -> Tensor:
        """Values of answer tokens, by sample index, laid out as the answers are, float32 (B, T), 0 elsewhere."""
        laid = np.zeros(tuple(self.token_BT.shape), dtype=np.float32)
        for row, first, end, index in self.spans:
            laid[row, first:end] = values[index]
        return torch.from_numpy(laid).to(self.token_BT.device)

    def unlay(self, value_N: Tensor) -> dict[int, npt.NDArray[np.float32]]:
        """The other way: values of the scored tokens, (N,), by sample index."""
        lengths = [end - first for _, first, end, _ in self.spans]
        order = sorted(range(len(self.spans)), key=lambda i: self.spans[i][:2])
        parts = torch.split(value_N.detach().float().cpu(), [lengths[i] for i in order])
        return {self.spans[i][3]: part.numpy() for i, part in zip(order, parts, strict=True)}

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return PackedBatch(**moved, spans=self.spans)


def pack(
    samples: Sequence[TrainSample], rows: Sequence[Sequence[int]], pad_id: int = 0, width: int | None = None
) -> PackedBatch:
    """The samples laid out as `rows` says (of `first_fit`, or a part). `width`: T, else what the fullest needs."""
    used = [sum(len(samples[index]) for index in row) for row in rows]
    T = width if width is not None else max(used, default=0)
    if not rows or max(used) > T:
        raise ValueError(f"{len(rows)} rows, the fullest of {max(used, default=0)} tokens, do not fit a width of {T}")
    shape = (len(rows), max(T, 2))
    token, position = np.full(shape, pad_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    segment = np.full(shape, PADDING, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    behaviour, advantage = (np.zeros(shape, dtype=np.float32) for _ in range(2))
    spans = []
    for b, row in enumerate(rows):
        start = 0
        for index in row:
            sample = samples[index]
            first, end = start + len(sample.prompt), start + len(sample)
            token[b, start:first], token[b, first:end] = sample.prompt, sample.answer
            position[b, start:end] = np.arange(end - start)
            segment[b, start:end] = index
            mask[b, first:end] = True
            behaviour[b, first:end] = sample.behaviour
            advantage[b, first:end] = sample.advantage
            spans.append((b, first, end, index))
            start = end
        position[b, start:] = np.arange(shape[1] - start)
    assert not mask[:, 0].any(), "the first cell of a row has no prediction"
    return PackedBatch(
        token_BT=torch.from_numpy(token),
        position_BT=torch.from_numpy(position),
        segment_BT=torch.from_numpy(segment),
        mask_BT=torch.from_numpy(mask),
        behaviour_BT=torch.from_numpy(behaviour),
        advantage_BT=torch.from_numpy(advantage),
        spans=tuple(spans),
    )
