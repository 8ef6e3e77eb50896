"""The group's verdict: is the output paid for, and if not, which one stage is to blame.

*Group reward*: a right final state clears the whole group without looking at the stages. The risk of that policy is a
stage whose deviation vanishes before the last layer; what vanishes also did no harm.

*Blame*: on failure the first stage whose commitment deviates from the verifier's replay is named, the output is
rejected, the node removed, the others paid. `refimpl/pipeline/blame.py` says why its input was honest, and what it may
show in its defence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from refimpl.pipeline.blame import Commitment, SignedDigest, Verdict, Verify

Chunk = tuple[int, int]
"""(request, chunk)."""


@dataclass(frozen=True, slots=True)
class LinkTrouble:
    """A soft verdict: something was not delivered or not confirmed, nobody can say by whose fault. Never a slash."""

    sender: int
    receiver: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What happens to a group's output and its members, by stage index."""

    accepted: bool
    decided: bool  # False: the verifier could not compare; nobody is paid or blamed yet
    blamed: tuple[int, ...]
    paid: tuple[int, ...]
    links: tuple[LinkTrouble, ...]
    reason: str


class NotShown(Exception):
    """A stage did not answer when it was to show its input, or was told to forget it. Takes exactly one argument: the
    stage's index."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)

    @property
    def stage(self) -> int:
        return int(self.args[0])


def first_deviating_stage(deviates: Sequence[Sequence[bool]]) -> int | None:
    """The first stage with any deviating chunk; None: all agree. `deviates[s][c]`: does stage s's commitment to chunk c
    deviate from the replay?

    The replay is forced to the submitted tokens, so what a later stage does cannot reach an earlier one: every boundary
    before the first deviating stage agrees in all chunks, and with it all that this stage ever had as input.
    """
    return next((stage for stage, chunks in enumerate(deviates) if any(chunks)), None)


def shown_commitments(
    digests: Sequence[SignedDigest], *, ring: str, epoch: int, sender: str, verify: Verify
) -> dict[Chunk, Commitment]:
    """What a stage can show that its predecessor committed to: only what that one signed for this ring and epoch."""
    shown: dict[Chunk, Commitment] = {}
    for signed in digests:
        digest = signed.digest
        if (digest.ring, digest.epoch, digest.sender) == (ring, epoch, sender) and signed.holds(verify):
            shown.update({(c.request, c.chunk): c for c in digest.commitments})
    return shown


def about(requests: Iterable[int], digests: Iterable[SignedDigest]) -> tuple[SignedDigest, ...]:
    """Those that commit to something of these requests: a judgement needs no others, and a ring signs many."""
    wanted = set(requests)
    return tuple(s for s in digests if any(c.request in wanted for c in s.digest.commitments))


def disowned(stated: Mapping[Chunk, Commitment], shown: Mapping[Chunk, Commitment]) -> Chunk | None:
    """The first chunk for which a stage told its successor something else than it told the verifier; None: none.

    Both were signed by it, so it is guilty of one of them.
    """
    return next((key for key in sorted(shown) if key in stated and stated[key] != shown[key]), None)


def trial(accused: int, follows: Callable[[int], bool]) -> int | None:
    """The guilty stage, beginning with the accused one; None: every output follows from its input, so it was noise.

    `follows(s)`: does what stage s signed follow from what stage s - 1 signed for it, when the layers of s are run on
    exactly that input? False also where s answers and cannot show its input: an honest stage keeps it until the
    verdict. It raises `NotShown` where s does not answer, or was told to forget: nobody is blamed for having died, or
    for what another said.
    """
    stage = accused
    while follows(stage):
        if stage == 0:
            return None
        stage -= 1
    return stage


def judge_group(
    stages: int,
    *,
    deviates: Sequence[Sequence[bool]] | None,
    members: Sequence[str],
    settled: Sequence[Verdict] = (),
    disowning: Sequence[int] = (),
    links: Sequence[LinkTrouble] = (),
    follows: Callable[[int], bool] | None = None,
) -> Judgement:
    """The judgement over one group's output.

    `deviates`: per stage and chunk, the last row being the final state; None: the verifier could not compare. Rows
    before the last are looked at only when the last deviates. `members`: the stages' public keys. `settled`: verdicts
    on complaints; `disowning`: stages convicted by `disowned`; `follows`: see `trial`.
    """
    if len(members) != stages or (deviates is not None and len(deviates) != stages):
        raise ValueError(f"{stages} stages, {len(members)} members: expected one row and one key for each")
    everyone = tuple(range(stages))

    def judged(accepted: bool, blamed: set[int], reason: str, decided: bool = True) -> Judgement:
        paid = tuple(s for s in everyone if decided and s not in blamed)
        soft = tuple(links)
        guilty_ones = tuple(sorted(blamed))
        return Judgement(accepted=accepted, decided=decided, blamed=guilty_ones, paid=paid, links=soft, reason=reason)

    convicted = {members.index(v.culprit): v.reason for v in settled if v.culprit in members}
    convicted |= dict.fromkeys(disowning, "told the verifier another commitment than its successor")
    if convicted:
        reasons = "; ".join(f"stage {stage}: {reason}" for stage, reason in sorted(convicted.items()))
        return judged(False, set(convicted), reasons)
    if links:
        return judged(False, set(), f"not complete: {links[0].reason}", decided=False)
    if deviates is None:
        return judged(False, set(), "the verifier could not compare", decided=False)
    if not any(deviates[-1]):
        return judged(True, set(), "the final state agrees with the replay")
    accused = first_deviating_stage(deviates)
    assert accused is not None
    try:
        guilty = accused if follows is None else trial(accused, follows)
    except NotShown as silence:
        trouble = LinkTrouble(silence.stage - 1, silence.stage, "the receiver does not show what it was sent")
        links = [*links, trouble]
        return judged(False, set(), f"stage {silence.stage} does not show its input: undecided", decided=False)
    if guilty is None:
        return judged(False, set(), f"stage {accused} deviates first, but every output follows from its input: noise")
    moved = "" if guilty == accused else f" (stage {accused} deviates first, and showed that it was fed so)"
    return judged(False, {guilty}, f"stage {guilty} is the first whose output does not follow from its input{moved}")
