"""What a version's parts cost, as quantities of arithmetic: the same for a real model and for its stand-in.

A device of the simulator turns them into seconds (`sim/hardware.py`); real worlds measure instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from refimpl.grpo.rollout import Sample
from refimpl.work import Backward, Forward, ModelSize, Prove, Several, Verify, Work

ROW_TOKENS = 32_768
"""Cells of one packed row: what the trainer has in flight at once when it only looks at log-probabilities."""


def generate_work(
    size: ModelSize, prompt_tokens: int, answer_tokens: Sequence[int], *, at_once: int | None = None
) -> Work:
    """A unit: prefill, decode steps, proofs. `at_once`: answers that the engine's cache holds (None: all); the next
    begins where one ends."""
    slots = min(at_once or len(answer_tokens), len(answer_tokens))
    parts: list[Work] = []
    for first in range(0, len(answer_tokens), slots):
        rows = min(slots, len(answer_tokens) - first)
        parts.append(Forward(model=size, batch=rows, new_tokens=prompt_tokens))
    parts += decode_work(size, prompt_tokens, answer_tokens, slots)
    parts.append(Prove(tokens=sum(answer_tokens), hidden=size.hidden))
    return Several(tuple(parts))


def decode_work(size: ModelSize, prompt_tokens: int, answer_tokens: Sequence[int], slots: int) -> list[Forward]:
    """Decode steps with `slots` answers at once, the next begun where one ends: a stretch of equal batch each, at the
    mean length that its answers have by then. The first token of each answer comes of the prefill."""
    left = [count - 1 for count in answer_tokens if count > 1]
    ends: list[tuple[int, int]] = []  # of those at work: (step in which it ends, step in which it began)
    stretches, now = [], 0
    for steps in left[:slots]:
        heapq.heappush(ends, (steps, 0))
    waiting = iter(left[slots:])
    while ends:
        until = ends[0][0]
        if until > now:
            past = prompt_tokens + 1 + round(sum(now - began for _, began in ends) / len(ends))
            stretches.append(Forward(model=size, batch=len(ends), new_tokens=1, past_tokens=past, steps=until - now))
        now = until
        while ends and ends[0][0] == now:
            heapq.heappop(ends)
            following = next(waiting, None)
            if following is not None:
                heapq.heappush(ends, (now + following, now))
    return stretches


def prefill_work(size: ModelSize, rows: int, tokens: int) -> list[Forward]:
    """One look at `rows` sequences of `tokens` tokens each, as many at once as a packed row holds."""
    at_once = max(1, ROW_TOKENS // tokens)
    passes, rest = divmod(rows, at_once)
    forwards = [Forward(model=size, batch=at_once, new_tokens=tokens)] * passes
    return forwards + ([Forward(model=size, batch=rest, new_tokens=tokens)] if rest else [])


def check_work(size: ModelSize, rows: int, tokens: int, prompt_tokens: int) -> Work:
    """A unit's check: one prefill over prompts and answers, and the proofs against it."""
    each = max(1, round(tokens / max(1, rows))) + prompt_tokens
    return Several((*prefill_work(size, max(1, rows), each), Verify(tokens=max(1, tokens), hidden=size.hidden)))


def step_work(size: ModelSize, samples: Sequence[Sample], optimizer_steps: int, *, reference: bool = False) -> Work:
    """A version: log-probabilities come first, with several optimizer steps by the weights that it begins with, and by
    a `reference` where the loss has one."""
    tokens = sum(len(sample.input_tokens) + len(sample.output_tokens) for sample in samples)
    mean = max(1, round(tokens / len(samples)))
    backward = Backward(model=size, tokens=tokens, sequence_tokens=mean, optimizer_steps=optimizer_steps)
    scored = prefill_work(size, len(samples), mean) * ((optimizer_steps > 1) + reference)
    return Several((*scored, backward)) if scored else backward
