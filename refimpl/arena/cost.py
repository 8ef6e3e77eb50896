"""What verifying costs: against one bare prefill of the same tokens, and against generating them.

CPU time, since other work may share the machine: the smallest of several rounds, by length of the answers and batch.
Three steps of verifying: the prefill itself (states of every token, no logits), the head over the answer's tokens with
all that is read from the logits (margins, probabilities), and the policy's checks of commitments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from refimpl.arena.bench import Bench, Sent
from refimpl.arena.verifier import Opened, open_answer
from refimpl.arena.verifiers import POLICIES, VERIFIERS


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One length and batch. Seconds of CPU for all its answers."""

    batch: int
    tokens: int  # of each answer
    prompt_tokens: float
    generate_s: float
    commit_s: float
    prefill_s: float
    logits_s: float
    check_s: float

    @property
    def against_prefill(self) -> float:
        return (self.prefill_s + self.logits_s + self.check_s) / self.prefill_s

    @property
    def beyond_logits(self) -> float:
        """Against a prefill that gives logits, as generating needs them too."""
        return (self.prefill_s + self.logits_s + self.check_s) / (self.prefill_s + self.logits_s)

    @property
    def against_generating(self) -> float:
        return (self.prefill_s + self.logits_s + self.check_s) / self.generate_s


def costs(bench: Bench, lengths: Sequence[int], batches: Sequence[int], rounds: int = 3) -> Iterator[Cost]:
    """Measured now, on honest answers cut to each length."""
    for batch in batches:
        honest = [sent for one in bench.batches("honest", batch) for sent in one.sent]
        for tokens in lengths:
            cut = [
                replace(sent, tokens=sent.tokens[:tokens], logprobs=sent.logprobs[:tokens], states=sent.states[:tokens])
                for sent in honest
                if len(sent.tokens) >= tokens
            ]
            if cut:
                yield cost_of(bench, cut, tokens, rounds)


def cost_of(bench: Bench, sent: Sequence[Sent], tokens: int, rounds: int) -> Cost:
    """One length, one batch."""
    sampling, members = bench.shop.sampling, [VERIFIERS[name] for name in POLICIES["default"]]
    prompts, seeds = [bench.prompt(one.index) for one in sent], [bench.seed(one.index) for one in sent]
    answers = [one.tokens for one in sent]
    writer = bench.shop.engine(bench.shop.decoder(), batch=len(sent))
    writer.answer_tokens_max = tokens
    replays = bench.verifier.replay(prompts, answers)

    def opened() -> list[Opened]:
        return [open_answer(replay, seed, sampling) for replay, seed in zip(replays, seeds, strict=True)]

    def committed() -> list[list[tuple[bytes, ...]]]:
        return [[verifier.commitments(one.states) for one in sent] for verifier in members]

    cases = [bench.case(one, seen) for one, seen in zip(sent, opened(), strict=True)]
    commitments = committed()

    def checked() -> None:
        for verifier, own in zip(members, commitments, strict=True):
            for case, raw in zip(cases, own, strict=True):
                verifier.find(case, raw)

    return Cost(
        batch=len(sent),
        tokens=tokens,
        prompt_tokens=sum(map(len, prompts)) / len(prompts),
        generate_s=_cpu(lambda: writer.answer(prompts, seeds), 1),
        commit_s=_cpu(committed, rounds),
        prefill_s=_cpu(lambda: bench.verifier.replay(prompts, answers), rounds),
        logits_s=_cpu(opened, rounds),
        check_s=_cpu(checked, rounds),
    )


def _cpu(work: Callable[[], object], rounds: int) -> float:
    """The smallest CPU time of several rounds."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def markdown(found: Sequence[Cost], command: str) -> str:
    """The cost table."""
    lines = [
        f"`{command}`: seconds of CPU, smallest of three rounds (generating: once); one thread.",
        "",
        "| batch | answer tokens | prompt tokens | generate | commit | prefill | logits, margins | check | "
        "over bare prefill | over prefill with logits | over generating |",
        "| " + " | ".join(["---"] * 11) + " |",
    ]
    for c in found:
        lines.append(
            f"| {c.batch} | {c.tokens} | {c.prompt_tokens:.0f} | {c.generate_s:.2f} | {c.commit_s:.3f} | "
            f"{c.prefill_s:.3f} | {c.logits_s:.3f} | {c.check_s:.3f} | {c.against_prefill:.2f} | "
            f"{c.beyond_logits:.2f} | 1/{1 / c.against_generating:.1f} |"
        )
    return "\n".join(lines) + "\n"
