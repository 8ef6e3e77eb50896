"""The validator: replays each submission with the right model and says accept or reject, with a reason.

Takes `Submission`, answers with `Verdict`, tells the ledger by `RecordVerdict`. Follows the INTELLECT-2 validator:
cheap checks first, then one prefill over prompt and answer, then TOPLOC, then the text itself (how it ends, whether the
seed gives it). A submission is judged once: the same content again gets the verdict from before. A check that breaks is
no verdict, about nobody. A rejection is hard (the stake is slashed) or soft (no pay); answers of a group may count only
together (`toploc.groups`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from refimpl.calls import Patience, call_patiently
from refimpl.identity import Identity, address_of, verify
from refimpl.journal import Journal
from refimpl.messages import (
    Account,
    AskAccount,
    Message,
    RecordVerdict,
    Submission,
    Verdict,
    record_bytes,
    submission_bytes,
)
from refimpl.toploc.groups import Groups
from refimpl.work import Work
from refimpl.world import CallError, World

RECORD = "record"  # signature domain, the ledger's

CODES = {
    "ok": "all checks passed",
    "bad_signature": "not signed by the key that it names",
    "no_account": "nobody with an account in good standing sent it",
    "second_answer": "this place of this assignment was answered already, otherwise",
    "wrong_checkpoint": "claims other weights than the ones in force",
    "wrong_problem": "not the problem that the deterministic rule gives this worker",
    "bad_tokens": "tokens outside the vocabulary, too many, or none",
    "bad_logprobs": "log-probabilities that are missing, not finite or above zero",
    "wrong_count": "not one proof per chunk",
    "malformed": "a proof that no builder can have written",
    "not_binding": "a proof that fits whatever it is held against",
    "short_chunk": "a chunk with fewer numbers than a published proof binds",
    "mismatch": "too many activations differ by a factor of two or in sign",
    "drift": "activations differ more than honest noise allows",
    "bad_ending": "cut short, gone on after its end, or ended where the model would not end",
    "wrong_seed": "tokens that the assignment's seed does not give",
    "incomplete_group": "the rest of its assignment never came",
    "no_verdict": "the check itself failed",
}
"""Every word a verdict may carry."""


class Outcome(Protocol):
    """What a check says of one submission."""

    @property
    def accepted(self) -> bool: ...

    @property
    def undecided(self) -> bool:
        """The check could not be made; says nothing about the worker."""
        ...

    @property
    def code(self) -> str:
        """A word of `CODES`, when not accepted."""
        ...

    @property
    def reason(self) -> str: ...

    @property
    def chunks(self) -> Sequence[Any]:
        """Scores per chunk, when proofs were compared."""
        ...


class Checker(Protocol):
    """Proof checking as the validator sees it: `toploc.checker` does it with a real model."""

    def precheck(self, submission: Submission) -> tuple[str, str] | None:
        """What can be said of the proofs without a model: (code, sentence) when they are bad."""
        ...

    def work(self, prompts: Sequence[Sequence[int]], submissions: Sequence[Submission]) -> Work:
        """What `check` costs."""
        ...

    def check(
        self, prompts: Sequence[Sequence[int]], submissions: Sequence[Submission]
    ) -> Sequence[Outcome | Exception]:
        """One outcome per submission, or the exception that its check ended with."""
        ...


@dataclass(frozen=True, kw_only=True)
class ValidatorConfig:
    """What is accepted."""

    ledger: str  # node name
    checkpoint: str  # content hash of the weights in force
    vocabulary: int
    answer_tokens_max: int
    batch: int = 8  # submissions replayed together
    soft: frozenset[str] = frozenset()  # words of `CODES` whose rejections cost no stake
    group: int = 1  # answers of an assignment
    grace_s: float = 0.0  # for the rest of a group, from its first verdict; 0: each answer is credited by itself
    patience: Patience = Patience()

    def __post_init__(self) -> None:
        if not self.soft <= CODES.keys():
            raise ValueError(f"soft has {sorted(self.soft - CODES.keys())}; expected words of {', '.join(CODES)}")


class Validator:
    """`serve()`, then `run()` until `stop()`."""

    def __init__(
        self,
        world: World,
        config: ValidatorConfig,
        identity: Identity,
        checker: Checker,
        prompt_of: Callable[[int], Sequence[int]],
        problem_of: Callable[[str, Submission], int | None],
        journal: Journal,
    ) -> None:
        """`problem_of(address, submission)` is the problem that the deterministic rule gives for the step, counter and
        index that the submission names; None when no such assignment is given out."""
        self.world, self.config, self.identity, self.checker = world, config, identity, checker
        self.prompt_of, self.problem_of, self.journal = prompt_of, problem_of, journal
        self.stopped = False
        self._queue: deque[tuple[str, Submission]] = deque()
        self._arrived = world.signal()
        self._verdicts: dict[str, Verdict] = {}
        self._judged: dict[str, Any] = {}  # submission id -> signal set when judged
        self._slots: dict[tuple[str, int, int, int], str] = {}  # (key, step, counter, index) -> submission id
        self._standing: dict[str, Account] = {}  # by public key, as the ledger last said
        self._groups: Groups[RecordVerdict] | None = Groups(config.group, config.grace_s) if config.grace_s else None

    def serve(self) -> None:
        self.world.serve({Submission: self.submit})

    def stop(self) -> None:
        self.stopped = True
        self._arrived.set()

    async def submit(self, source: str, submission: Submission) -> Message:
        content = submission_bytes(submission)
        identifier = hashlib.sha256(content).hexdigest()
        signed = verify(submission.public_key, content, submission.signature, domain="submission")
        del content  # the wait for a verdict may be long, and many wait
        if not signed:
            # whoever sent this is not shown to be the one it names: nobody is to blame
            return Verdict(identifier, False, "bad_signature", CODES["bad_signature"], decided=False)
        duplicate = identifier in self._judged
        if not duplicate:
            if (reason := await self._no_account(submission.public_key)) is not None:
                return Verdict(identifier, False, "no_account", reason, decided=False)
            slot = (submission.public_key, submission.step, submission.counter, submission.index)
            if self._slots.setdefault(slot, identifier) != identifier:
                # not slashed: a worker that was restarted may honestly answer again, a little differently
                return Verdict(identifier, False, "second_answer", CODES["second_answer"], decided=False)
            duplicate = identifier in self._judged  # the same content may have come while the ledger was asked
        if not duplicate:
            self._judged[identifier] = self.world.signal()
            self.journal("submitted", worker=source, submission=identifier, tokens=submission.tokens.size)
            self._queue.append((identifier, submission))
            self._arrived.set()
        await self._judged[identifier].wait()  # where no verdict came of it, it may be sent again
        verdict = self._verdicts[identifier]
        if duplicate:
            verdict = Verdict(
                identifier, verdict.accepted, verdict.code, verdict.reason, decided=verdict.decided, duplicate=True
            )
        return verdict

    async def _no_account(self, public_key: str) -> str | None:
        """Why nothing is judged for this key; None for one in good standing. No replay is spent on strangers."""
        if public_key not in self._standing:
            try:
                self._standing[public_key] = await call_patiently(
                    self.world, self.config.ledger, AskAccount(public_key), self.config.patience
                )
            except CallError as error:
                return error.reason
        return "the account was ejected" if self._standing[public_key].ejected else None

    async def run(self) -> None:
        if self._groups is not None:
            self.world.spawn(self._close_groups(self._groups), "groups")
        while not self.stopped:
            await self._arrived.wait()
            self._arrived = self.world.signal()
            while self._queue:
                count = min(self.config.batch, len(self._queue))
                await self._judge([self._queue.popleft() for _ in range(count)])

    # -------------------------------------------------------------------------------------------------- the checks
    async def _judge(self, batch: list[tuple[str, Submission]]) -> None:
        """Verdicts for `batch`: cheap checks one by one, one replay for those that pass them."""
        verdicts: dict[str, Verdict] = {}
        outcomes: dict[str, Outcome] = {}
        replayable: list[tuple[str, Submission]] = []
        for identifier, submission in batch:
            try:
                code, reason = self._cheap_checks(submission)
            except Exception as error:  # a broken check must not stop the validator, nor convict anybody
                verdicts[identifier] = _no_verdict(identifier, error)
                continue
            if code == "ok":
                replayable.append((identifier, submission))
            else:
                verdicts[identifier] = Verdict(identifier, False, code, reason)
        if replayable:
            prompts = [self.prompt_of(submission.problem_id) for _, submission in replayable]
            submissions = [submission for _, submission in replayable]
            results = await self._check(prompts, submissions)
            for (identifier, _), result in zip(replayable, results, strict=True):
                if isinstance(result, Exception):
                    verdicts[identifier] = _no_verdict(identifier, result)
                elif result.undecided:
                    verdicts[identifier] = Verdict(identifier, False, "no_verdict", result.reason, decided=False)
                else:
                    code = "ok" if result.accepted else result.code
                    verdicts[identifier] = Verdict(identifier, result.accepted, code, result.reason)
                    outcomes[identifier] = result
        await self.world.gather(
            *(self._say(submission, verdicts[identifier], outcomes.get(identifier)) for identifier, submission in batch)
        )

    async def _check(self, prompts: list[Any], submissions: list[Submission]) -> Sequence[Outcome | Exception]:
        """All together; if that breaks, one by one, so that only the one that breaks it gets no verdict."""
        try:
            work = self.checker.work(prompts, submissions)
            return await self.world.compute(work, lambda: self.checker.check(prompts, submissions))
        except Exception as error:
            if len(submissions) == 1:
                return [error]
        return [
            (await self._check([prompt], [submission]))[0]
            for prompt, submission in zip(prompts, submissions, strict=True)
        ]

    def _cheap_checks(self, submission: Submission) -> tuple[str, str]:
        """(code, sentence) from what needs no model, in a fixed order."""
        config, tokens, logprobs = self.config, submission.tokens, submission.logprobs
        if submission.checkpoint != config.checkpoint:
            return "wrong_checkpoint", f"claims {submission.checkpoint[:16]!r}, {config.checkpoint[:16]!r} is in force"
        if tokens.dtype != np.int32 or tokens.ndim != 1 or not 1 <= tokens.size <= config.answer_tokens_max:
            return "bad_tokens", f"{tokens.dtype} {tokens.shape}: int32, 1 to {config.answer_tokens_max} were expected"
        if int(tokens.min()) < 0 or int(tokens.max()) >= config.vocabulary:
            return "bad_tokens", f"token ids {tokens.min()} to {tokens.max()}, 0 to {config.vocabulary - 1} exist"
        if logprobs.dtype != np.float32 or logprobs.shape != tokens.shape:
            return "bad_logprobs", f"{logprobs.dtype} {logprobs.shape} for {tokens.size} tokens"
        if not np.isfinite(logprobs).all() or float(logprobs.max()) > 1e-3:
            return "bad_logprobs", "log-probabilities must be finite and 0 at most"
        expected = self.problem_of(address_of(submission.public_key), submission)
        if expected is None:
            place = f"step {submission.step}, assignment {submission.counter}, index {submission.index}"
            return "wrong_problem", f"{place}: no such assignment is given out"
        if submission.problem_id != expected:
            return "wrong_problem", f"answers problem {submission.problem_id}, the rule gives {expected}"
        return self.checker.precheck(submission) or ("ok", CODES["ok"])

    async def _say(self, submission: Submission, verdict: Verdict, outcome: Outcome | None) -> None:
        """Record a verdict everywhere it belongs: journal, ledger, and then whoever waits for it."""
        assert verdict.code in CODES, verdict.code
        scores = outcome.chunks if outcome is not None else ()
        self.journal(
            "judged",
            public_key=submission.public_key,
            submission=verdict.submission_id,
            counter=submission.counter,
            index=submission.index,
            accepted=verdict.accepted,
            decided=verdict.decided,
            code=verdict.code,
            reason=verdict.reason,
            tokens=submission.tokens.size,
            mismatches=[score.exponent_mismatches for score in scores],
            mean_errors=[round(min(score.mantissa_mean, 999.0), 4) for score in scores],
            median_errors=[min(score.mantissa_median, 999.0) for score in scores],
        )
        for entry in self._entries(submission, verdict):
            await self._tell_ledger(entry)
        self._verdicts[verdict.submission_id] = verdict
        judged = self._judged[verdict.submission_id]
        if not verdict.decided:
            del self._judged[verdict.submission_id]
            del self._slots[submission.public_key, submission.step, submission.counter, submission.index]
        judged.set()

    def _entries(self, submission: Submission, verdict: Verdict) -> list[RecordVerdict]:
        """What the ledger is told now: this verdict, or where groups count, the credits of a group that is complete."""
        record = self._record(submission, verdict)
        if self._groups is None:
            return [record] if verdict.decided else []
        name = (submission.public_key, submission.step, submission.counter)
        credit = record if verdict.accepted else None
        ready, late = self._groups.judged(name, submission.index, credit, self.world.now())
        rejected = [record] if verdict.decided and not verdict.accepted else []
        return [*rejected, *ready, *map(_incomplete, late)]

    def _record(self, submission: Submission, verdict: Verdict) -> RecordVerdict:
        """What the ledger is to enter, unsigned."""
        return RecordVerdict(
            submission.public_key,
            verdict.submission_id,
            verdict.accepted,
            verdict.code,
            float(submission.tokens.size) if verdict.accepted else 0.0,
            hard=verdict.code not in self.config.soft,
            validator_key=self.identity.public_key,
        )

    async def _tell_ledger(self, unsigned: RecordVerdict) -> None:
        signature = self.identity.sign(record_bytes(unsigned), domain=RECORD)
        record = dataclasses.replace(unsigned, signature=signature)
        try:
            account = await call_patiently(self.world, self.config.ledger, record, self.config.patience)
            self._standing[record.public_key] = account
        except CallError as error:
            self.journal("unrecorded", submission=record.submission_id, reason=error.reason)

    async def _close_groups(self, groups: Groups[RecordVerdict]) -> None:
        """Invalidate, softly, what is left of groups whose grace is over."""
        while not self.stopped:
            await self.world.sleep(self.config.grace_s / 2)
            for entry in groups.overdue(self.world.now()):
                await self._tell_ledger(_incomplete(entry))


def _incomplete(credit: RecordVerdict) -> RecordVerdict:
    """The entry for an accepted answer whose group never came whole."""
    return dataclasses.replace(credit, accepted=False, code="incomplete_group", units=0.0, hard=False)


def _no_verdict(identifier: str, error: Exception) -> Verdict:
    return Verdict(identifier, False, "no_verdict", f"{type(error).__name__}: {error}"[:500], decided=False)
