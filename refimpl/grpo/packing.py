"""Many answers in one row, so that no compute is spent on padding, and none of them sees another.

Answers of a batch differ in length by tens of times; padded to the longest, most of the batch would be padding. So
they are laid end to end in rows of equal capacity. A border between two of them is a border for attention (a block
mask), for positions (each starts at 0) and for labels (the first token of a prompt has no prediction). Packed equals
unpacked: the tests hold log-probabilities and gradients to it.

The answers of a group share their prompt, so in one row they may share its cells too: each answer sees the prompt and
itself, its positions go on from the prompt's end, and its first token is predicted by the prompt's last. The prompt is
computed once, its gradient is the sum over its answers, as ever. Wider rows save prompt cells and cost attention over
pairs that are then masked; `plan_rows` weighs the two.

Differs from the original (prime-rl, April 2025):
1) a rank with fewer rows than another gets rows of padding without loss; there it trains its first row again, so some
   tokens counted twice;
2) answers longer than a row are cut only on request, and the cut ones are counted;
3) answers may share a prompt.

One convention for all token tensors: index t speaks of token t, given those before it. The prediction of token t is
made by the hidden state of the token before it, which stands at t - 1, or where a shared prompt ends.

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
    for place, token in enumerate(tokens if isinstance(tokens, list) else np.asarray(tokens).tolist()):
        if token in end_ids:
            return place + 1
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


def plan_rows(
    samples: Sequence[TrainSample], *, hidden: int, capacity: int | None = None, share_prompts: bool = True
) -> list[list[int]]:
    """Rows of sample indices that cost least, answers with equal prompts side by side. `hidden`: D of the model.

    With `capacity`, rows of that many cells; else the cheapest of some multiples of the longest sample. Cost in units
    of one cell through a layer, 12 D² multiplications: cells, and 2 D for each pair of cells that attention looks at.
    """
    longest = max((len(sample) for sample in samples), default=0)
    plans: list[tuple[float, int, list[list[int]]]] = []
    for width in [capacity] if capacity is not None else [longest * times for times in (1, 2, 4, 8)]:
        for shared in {share_prompts, False}:
            rows = _rows_of_blocks(samples, width, shared)
            used = [row_length(samples, row) if shared else sum(len(samples[i]) for i in row) for row in rows]
            pairs = sum(n * n if len(row) > 1 else n * n / 2 for n, row in zip(used, rows, strict=True))
            plans.append((sum(used) + pairs / (6 * hidden), len(plans), rows))
    return min(plans)[2]


def _rows_of_blocks(samples: Sequence[TrainSample], capacity: int, share_prompts: bool) -> list[list[int]]:
    """First fit of blocks: a prompt with as many of its answers as fit, or without sharing, a sample each."""
    if not share_prompts:
        return first_fit([len(sample) for sample in samples], capacity)
    groups: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(np.ascontiguousarray(sample.prompt, dtype=np.int64).tobytes(), []).append(index)
    blocks: list[list[int]] = []
    for members in groups.values():
        room = capacity - len(samples[members[0]].prompt)
        fitted = first_fit([len(samples[index].answer) for index in members], room)
        blocks += [[members[at] for at in block] for block in fitted]
    rows = first_fit([row_length(samples, block) for block in blocks], capacity)
    return [[index for number in row for index in blocks[number]] for row in rows]


def row_length(samples: Sequence[TrainSample], row: Sequence[int]) -> int:
    """Cells that these samples take in this order, neighbours with equal prompts sharing one."""
    length = 0
    for at, index in enumerate(row):
        shared = at and np.array_equal(samples[index].prompt, samples[row[at - 1]].prompt)
        length += len(samples[index].answer) + (0 if shared else len(samples[index].prompt))
    return length


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """Rows of samples as tensors, (B, T) but for the two index lists, (N,)."""

    token_BT: Tensor  # int64
    position_BT: Tensor  # int64, from 0 in each prompt, on through each of its answers, and from 0 in the padding
    segment_BT: Tensor  # int64, which cells belong together: a sample, a shared prompt, an answer to it, or PADDING
    sees_BT: Tensor  # int64, the segment that a cell sees besides its own: of an answer its shared prompt, else its own
    behaviour_BT: Tensor  # float32, 0 where nothing is scored
    advantage_BT: Tensor  # float32, 0 where nothing is scored
    scored_N: Tensor  # int64, the cells of answer tokens, ascending, in the flattened batch
    predictor_N: Tensor  # int64, the cell whose hidden state predicts each of them
    spans: tuple[tuple[int, int, int, int], ...]  # (row, first answer cell, end, sample index) of each sample

    @property
    def samples(self) -> int:
        return len(self.spans)

    @property
    def one_sample_a_row(self) -> bool:
        """True: every row is a text from its beginning, and plain causal attention serves (padding lies behind it)."""
        return len({row for row, *_ in self.spans}) == len(self.spans)

    def attention_B1TT(self) -> Tensor | None:
        """Bool, true where cell t may attend to cell s: not later, and of the same segment or one it sees. None: plain
        causal will do. Padding attends to padding, so no row of the softmax is empty.
        """
        if self.one_sample_a_row:
            return None
        source_B1T = self.segment_BT[:, None, :]
        allowed_BTT = (self.segment_BT[:, :, None] == source_B1T) | (self.sees_BT[:, :, None] == source_B1T)
        return allowed_BTT.tril_().unsqueeze(1)

    def totals(self) -> BatchTotals:
        return BatchTotals(tokens=len(self.scored_N), sequences=self.samples, cells=self.token_BT.numel())

    def predicting(self, hidden_BTD: Tensor) -> Tensor:
        """The hidden state that predicts each scored token, hidden_ND."""
        return hidden_BTD.flatten(0, 1).index_select(0, self.predictor_N)

    def scored(self, value_BT: Tensor) -> Tensor:
        """The values of the scored tokens, (N,), in the order of `predicting`."""
        return value_BT.flatten().index_select(0, self.scored_N)

    def lay(self, values: Sequence[npt.NDArray[np.float32]]) -> Tensor:
        """Values of answer tokens, by sample index, laid out as the answers are, float32 (B, T), 0 elsewhere."""
        laid = np.zeros(tuple(self.token_BT.shape), dtype=np.float32)
        for row, first, end, index in self.spans:
            laid[row, first:end] = values[index]
        return torch.from_numpy(laid).to(self.token_BT.device)

    def unlay(self, value_N: Tensor) -> dict[int, npt.NDArray[np.float32]]:
        """The other way: values of the scored tokens, (N,), by sample index."""
        parts = torch.split(value_N.detach().float().cpu(), [end - first for _, first, end, _ in self.spans])
        return {index: part.numpy() for (*_, index), part in zip(self.spans, parts, strict=True)}

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return PackedBatch(**moved, spans=self.spans)


def pack(
    samples: Sequence[TrainSample],
    rows: Sequence[Sequence[int]],
    *,
    pad_id: int = 0,
    width: int | None = None,
    share_prompts: bool = False,
) -> PackedBatch:
    """The samples laid out as `rows` says (of `plan_rows`, `first_fit`, or a part of them). `width`: T, else what the
    fullest row needs. `share_prompts`: neighbours in a row with equal prompts share one."""
    lengths = [row_length(samples, row) if share_prompts else sum(len(samples[index]) for index in row) for row in rows]
    T = width if width is not None else max(lengths, default=0)
    if not rows or max(lengths) > T:
        raise ValueError(
            f"{len(rows)} rows, the fullest of {max(lengths, default=0)} tokens, do not fit a width of {T}"
        )
    shape = (len(rows), max(T, 1))
    token, position = np.full(shape, pad_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    segment, sees = (np.full(shape, PADDING, dtype=np.int64) for _ in range(2))
    behaviour, advantage = (np.zeros(shape, dtype=np.float32) for _ in range(2))
    spans: list[tuple[int, int, int, int]] = []
    scored: list[npt.NDArray[np.int64]] = []
    predictor: list[npt.NDArray[np.int64]] = []
    for b, row in enumerate(rows):
        start = prompt_end = 0
        for at, index in enumerate(row):
            sample = samples[index]
            joint = share_prompts and len(row) > 1
            if not (joint and at and np.array_equal(sample.prompt, samples[row[at - 1]].prompt)):
                prompt_end = start + len(sample.prompt)
                token[b, start:prompt_end] = sample.prompt
                position[b, start:prompt_end] = np.arange(prompt_end - start)
                # a prompt that may be shared is a segment of its own, named after its first sample
                segment[b, start:prompt_end] = sees[b, start:prompt_end] = len(samples) + index if joint else index
                start = prompt_end
            end = start + len(sample.answer)
            token[b, start:end] = sample.answer
            position[b, start:end] = len(sample.prompt) + np.arange(end - start)
            segment[b, start:end], sees[b, start:end] = index, segment[b, prompt_end - 1]
            behaviour[b, start:end], advantage[b, start:end] = sample.behaviour, sample.advantage
            spans.append((b, start, end, index))
            cells = b * shape[1] + np.arange(start, end)
            scored.append(cells)
            predictor.append(np.concatenate(([b * shape[1] + prompt_end - 1], cells[:-1])))
            start = end
        position[b, start:] = np.arange(shape[1] - start)
    nothing = np.zeros(0, dtype=np.int64)
    return PackedBatch(
        token_BT=torch.from_numpy(token),
        position_BT=torch.from_numpy(position),
        segment_BT=torch.from_numpy(segment),
        sees_BT=torch.from_numpy(sees),
        behaviour_BT=torch.from_numpy(behaviour),
        advantage_BT=torch.from_numpy(advantage),
        scored_N=torch.from_numpy(np.concatenate(scored) if scored else nothing),
        predictor_N=torch.from_numpy(np.concatenate(predictor) if predictor else nothing),
        spans=tuple(spans),
    )
