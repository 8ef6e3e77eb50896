"""What verifying costs: against one bare prefill of the same tokens, and against generating them.

CPU time, since other work may share the machine: the smallest of several rounds, by length of the answers and batch.

- *Bare prefill*: what any user pays for reading the same text: states of every token, logits of each text's last.
- *Head*: the product of the answer's states with the output head, nothing else. Whoever asks how tokens were sampled
  needs these logits, so prefill and head together are a floor. It is high for a small model with a large vocabulary.
- *Reading*: margins, exposures, probabilities from the logits, beyond that product (`toploc.one_pass`).
- *Check*: the default policy's verifiers on commitments and on what was read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from refimpl.arena.bench import Bench, Sent
from refimpl.arena.verifier import Opened, open_answers
from refimpl.arena.verifiers import POLICIES, VERIFIERS
from refimpl.engine import Replay
from refimpl.toploc.one_pass import ROWS


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One length and batch. Seconds of CPU for all its answers."""

    batch: int
    tokens: int  # of each answer
    prompt_tokens: float
    generate_s: float
    commit_s: float
    states_s: float  # a prefill without any logits
    last_s: float  # logits of each text's last token
    head_s: float
    opened_s: float  # head and reading
    check_s: float

    @property
    def prefill_s(self) -> float:
        """What any user pays."""
        return self.states_s + self.last_s

    @property
    def verify_s(self) -> float:
        return self.states_s + self.opened_s + self.check_s

    @property
    def against_prefill(self) -> float:
        return self.verify_s / self.prefill_s

    @property
    def floor(self) -> float:
        """With the head's product and nothing else."""
        return (self.states_s + self.head_s) / self.prefill_s

    @property
    def against_generating(self) -> float:
        return self.verify_s / self.generate_s


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
    sampling, members = bench.shop.sampling, [VERIFIERS[name] for name in POLICIES["default"].members]
    prompts, seeds = [bench.prompt(one.index) for one in sent], [bench.seed(one.index) for one in sent]
    answers = [one.tokens for one in sent]
    writer = bench.shop.engine(bench.shop.decoder(), batch=len(sent))
    writer.answer_tokens_max = tokens
    replays = bench.verifier.replay(prompts, answers)

    def opened() -> list[Opened]:
        return open_answers(replays, seeds, sampling)

    def head() -> None:
        hidden_ND = torch.cat([replay.hidden for replay in replays])
        with torch.no_grad():
            for start in range(0, len(hidden_ND), ROWS):
                replays[0].model.logits(hidden_ND[start : start + ROWS])

    def last() -> None:
        with torch.no_grad():
            replays[0].model.logits(torch.stack([replay.hidden[-1] for replay in replays]))

    def states() -> list[Replay]:
        return bench.verifier.replay(prompts, answers)

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
        states_s=_cpu(states, rounds),
        last_s=_cpu(last, rounds),
        head_s=_cpu(head, rounds),
        opened_s=_cpu(opened, rounds),
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
    columns = [
        "batch",
        "answer tokens",
        "prompt tokens",
        "generate",
        "commit",
        "bare prefill",
        "head",
        "reading",
        "check",
    ]
    columns += ["over bare prefill", "of this, prefill and head alone", "over generating"]
    lines = [
        f"`{command}`: seconds of CPU, smallest of three rounds (generating: once); one thread.",
        "",
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join(["---"] * len(columns)) + " |",
    ]
    for c in found:
        lines.append(
            f"| {c.batch} | {c.tokens} | {c.prompt_tokens:.0f} | {c.generate_s:.2f} | {c.commit_s:.3f} | "
            f"{c.prefill_s:.3f} | {c.head_s:.3f} | {c.opened_s - c.head_s:.3f} | {c.check_s:.3f} | "
            f"{c.against_prefill:.2f} | {c.floor:.2f} | 1/{1 / c.against_generating:.1f} |"
        )
    return "\n".join(lines) + "\n"
