"""The validator's check: one prefill with the right model, then TOPLOC's proof against replay, then the text itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from refimpl.messages import Submission
from refimpl.toploc.check import PRESETS, Thresholds, Verification, verify_proofs
from refimpl.toploc.proof import CHUNK_TOKENS, TOP_K, BadProof, Mode, Proof, chunk_count
from refimpl.toploc.text_check import TextRules, check_texts
from refimpl.work import Several, Verify, Work


class Replayer(Protocol):
    """What the check needs of an engine."""

    def replay(self, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> Sequence[Any]:
        """Per sequence an object whose `states` [n, hidden] (bf16) are the activations that chose each answer token."""
        ...

    def replay_work(self, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> Work:
        """What that costs."""
        ...


@dataclass(frozen=True, kw_only=True)
class CheckerConfig:
    """How proofs are held against the replay; see `toploc.check`."""

    mode: Mode = "strict"
    thresholds: Thresholds = PRESETS["paper"]
    chunk_tokens: int = CHUNK_TOKENS
    top_k: int = TOP_K


class ToplocChecker:
    """`validator.Checker` with a real model."""

    def __init__(
        self,
        engine: Replayer,
        config: CheckerConfig,
        *,
        hidden: int,
        text: TextRules | None = None,
        seed_of: Callable[[Submission], int] = lambda submission: 0,
    ) -> None:
        """`text`: what is asked of tokens beside their proofs; `seed_of`: what an answer was to be drawn with."""
        self.engine, self.config, self.hidden = engine, config, hidden
        self.text, self.seed_of = text, seed_of

    def precheck(self, submission: Submission) -> tuple[str, str] | None:
        config = self.config
        if config.mode != "strict":  # the published verifier looks at nothing before the replay
            return None
        chunks = chunk_count(submission.tokens.size, chunk_tokens=config.chunk_tokens)
        if len(submission.proofs) != chunks:
            return "wrong_count", f"{len(submission.proofs)} proofs for {chunks} chunks"
        for place, raw in enumerate(submission.proofs):
            try:
                Proof.decode(raw, top_k=config.top_k)
            except BadProof as error:
                return "malformed", f"proof {place}: {error}"
        return None

    def work(self, prompts: Sequence[Sequence[int]], submissions: Sequence[Submission]) -> Work:
        answers = [submission.tokens for submission in submissions]
        tokens = sum(len(answer) for answer in answers)
        check = Verify(
            tokens=tokens, hidden=self.hidden, top_k=self.config.top_k, chunk_tokens=self.config.chunk_tokens
        )
        return Several((self.engine.replay_work(prompts, answers), check))

    def check(
        self, prompts: Sequence[Sequence[int]], submissions: Sequence[Submission]
    ) -> list[Verification | Exception]:
        replays = self.engine.replay(prompts, [submission.tokens for submission in submissions])
        outcomes: list[Verification | Exception] = []
        for submission, replay in zip(submissions, replays, strict=True):
            try:
                outcomes.append(self._held(submission, replay))
            except Exception as error:  # one submission's check must not take its neighbours along
                outcomes.append(error)
        return outcomes

    def _held(self, submission: Submission, replay: Any) -> Verification:
        """Proof against replay; then, of what passed, the text."""
        config = self.config
        found = verify_proofs(
            replay.states,
            submission.proofs,
            mode=config.mode,
            thresholds=config.thresholds,
            chunk_tokens=config.chunk_tokens,
            top_k=config.top_k,
        )
        if self.text is None or not found.accepted:
            return found
        (wrong,) = check_texts([replay], [self.seed_of(submission)], self.text)
        return found if wrong is None else replace(found, accepted=False, reason=f"{wrong[0]}: {wrong[1]}")
