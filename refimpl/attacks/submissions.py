"""Dishonest submissions: nothing is wrong with the computation, or there is none; what is handed in is not one's own,
not new, not what was asked for, or no submission at all. One function, and one line in `SUBMISSION_ATTACKS`.

An attack gets an assignment that its author answered honestly, and one of somebody else's, both signed. It returns what
is sent, in order. What it should meet is a word of `toploc.validator.CODES` for each that must not be credited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refimpl.messages import Submission

Signed = list[Submission]
Send = Callable[[Signed, Signed, Callable[[Submission], Submission]], list[Submission]]
"""(own, another's, sign with the own key) -> what is sent."""


@dataclass(frozen=True, kw_only=True)
class SubmissionAttack:
    """A line of the table."""

    send: Send
    saves: str
    codes: frozenset[str]  # any of these is right; empty: only that nothing is credited twice
    credited: int  # answers that may be credited
    grace_s: float = 0.0  # that the validator gives groups where this is tried; 0: it does not look at groups
    soft: bool = False  # nobody is slashed


def replayed(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Hands in the same answers twice."""
    return [*own, *own]


def copied_verbatim(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Hands in somebody else's, with their signature."""
    return [*others, *others]


def copied(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Hands in somebody else's under its own name."""
    return [sign(replace(theirs, public_key=own[0].public_key)) for theirs in others]


def copied_to_own_problem(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Hands in somebody else's answers and proofs as answers to its own problems."""
    return [
        sign(replace(mine, tokens=theirs.tokens, logprobs=theirs.logprobs, proofs=theirs.proofs))
        for mine, theirs in zip(own, others, strict=True)
    ]


def proof_of_another(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Its own tokens with the proofs of its next answer."""
    return [
        sign(replace(mine, proofs=_fitted(donor.proofs, len(mine.proofs))))
        for mine, donor in zip(own, [*own[1:], own[0]], strict=True)
    ]


def second_thoughts(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Answers each place of the assignment twice, differently."""
    return [*own, *(sign(replace(mine, logprobs=mine.logprobs - np.float32(0.25))) for mine in own)]


def picked_problem(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Answers the problem that it likes best at every place."""
    return [sign(replace(own[0], index=mine.index)) for mine in own[1:]]


def problems_left_out(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Answers the half of its problems that it likes, and not the others."""
    return own[: len(own) // 2]


def invented_assignment(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Says that it was given another assignment."""
    return [sign(replace(mine, counter=mine.counter + 7)) for mine in own]


def another_step(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Hands in for a step that is not in force."""
    return [sign(replace(mine, step=mine.step + 9)) for mine in own]


def another_version(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Names weights that are not in force."""
    return [sign(replace(mine, checkpoint="0" * 64)) for mine in own]


def unsigned(own: Signed, others: Signed, sign: Callable[[Submission], Submission]) -> list[Submission]:
    """Changes a signed submission afterwards."""
    return [replace(mine, logprobs=mine.logprobs * np.float32(2)) for mine in own]


MALFORMED: dict[str, tuple[Any, str]] = {
    "index": (-1, "wrong_problem"), "index-beyond": (1 << 40, "wrong_problem"), "problem_id": (-5, "wrong_problem"),
    "counter": (-1, "wrong_problem"), "step": (-3, "wrong_problem"), "checkpoint": ("", "wrong_checkpoint"),
    "tokens": (np.zeros(0, np.int32), "bad_tokens"), "tokens-negative": (None, "bad_tokens"),
    "tokens-beyond": (None, "bad_tokens"), "tokens-square": (np.zeros((2, 2), np.int32), "bad_tokens"),
    "tokens-float": (np.zeros(8, np.float64), "bad_tokens"), "logprobs": (np.zeros(1, np.float32), "bad_logprobs"),
    "logprobs-nan": (None, "bad_logprobs"), "logprobs-positive": (None, "bad_logprobs"),
    "proofs": ((), "wrong_count"), "proofs-many": (None, "wrong_count"), "proofs-empty": (None, "malformed"),
    "proofs-zero": (None, "malformed"), "proofs-trailing": (None, "malformed"),
}  # fmt: skip
"""field, and how: (what it becomes, the word that it meets). None: made from what it replaces."""


def malformed(field: str) -> Send:
    """One field made into nonsense."""
    return lambda own, others, sign: [sign(_spoilt(own[0], field))]


def _spoilt(mine: Submission, field: str) -> Submission:
    """`mine` with one entry of MALFORMED."""
    value, _ = MALFORMED[field]
    made: dict[str, Any] = {
        "tokens-negative": np.full_like(mine.tokens, -1),
        "tokens-beyond": np.full_like(mine.tokens, 1 << 30),
        "logprobs-nan": np.full_like(mine.logprobs, np.nan),
        "logprobs-positive": np.full_like(mine.logprobs, 3.0),
        "proofs-many": (*mine.proofs, *mine.proofs),
        "proofs-empty": (b"",) * len(mine.proofs),
        "proofs-zero": tuple(bytes(len(proof)) for proof in mine.proofs),
        "proofs-trailing": tuple(proof + b"\0" for proof in mine.proofs),
    }
    changed: dict[str, Any] = {field.split("-")[0]: made[field] if value is None else value}
    return replace(mine, **changed)


def _fitted(proofs: Sequence[bytes], count: int) -> tuple[bytes, ...]:
    return tuple([*proofs, *list(proofs[-1:]) * count][:count])


WRONG = frozenset({"mismatch", "drift"})


def _line(send: Send, saves: str, codes: Sequence[str], credited: int = 0) -> SubmissionAttack:
    return SubmissionAttack(send=send, saves=saves, codes=frozenset(codes), credited=credited)


SUBMISSION_ATTACKS: dict[str, SubmissionAttack] = {
    "replayed": _line(replayed, "all compute, from the second time on", ("ok",), credited=4),
    "copied-verbatim": _line(copied_verbatim, "all compute", ("ok",), credited=4),
    "copied": _line(copied, "all compute", ("wrong_problem",)),
    "copied-to-own-problem": _line(copied_to_own_problem, "all compute", (*WRONG, "wrong_count")),
    "proof-of-another": _line(proof_of_another, "nothing: shows a hole", tuple(WRONG)),
    "second-thoughts": _line(second_thoughts, "a choice among answers", ("ok", "second_answer"), credited=4),
    "problems-picked": _line(picked_problem, "short or easy problems", ("wrong_problem", "second_answer")),
    "problems-left-out": SubmissionAttack(
        send=problems_left_out,
        saves="short or easy problems",
        codes=frozenset({"ok"}),
        credited=0,
        grace_s=0.3,
        soft=True,
    ),
    "invented-assignment": _line(invented_assignment, "a choice of problems", ("wrong_problem",)),
    "another-step": _line(another_step, "a download", ("wrong_problem",)),
    "another-version": _line(another_version, "a download", ("wrong_checkpoint",)),
    "changed-after-signing": _line(unsigned, "nothing: blames another", ("bad_signature",)),
    **{
        f"malformed-{field}": _line(malformed(field), "nothing: tries to break the validator", (code,))
        for field, (_, code) in MALFORMED.items()
    },
}
