"""Dishonest submissions before the whole validator: the real role, in one process, with a ledger that takes notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refimpl.attacks.submissions import SUBMISSION_ATTACKS
from refimpl.identity import Identity
from refimpl.journal import silent
from refimpl.messages import Account, AskAccount, RecordVerdict, Submission, Verdict, submission_bytes
from refimpl.swarm import RealEngines, SwarmPlan
from refimpl.testnet.problems import Choice, choose_problems
from refimpl.toploc.validator import Validator, ValidatorConfig
from refimpl.worlds.local import LocalFabric

BATCH = 4
CHEAT, HONEST = Identity.from_seed(1, "cheat"), Identity.from_seed(1, "honest")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What came of one attack."""

    verdicts: tuple[Verdict, ...]
    credited: int  # answers that the ledger was told to credit
    credited_twice: int  # of these, the same answer again
    slashed: frozenset[str]  # public keys
    invalidated: frozenset[str]  # public keys whose work was turned down softly


def sign(submission: Submission, identity: Identity = CHEAT) -> Submission:
    """`submission` in the name of `identity`."""
    named = replace(submission, signature=b"")
    return replace(named, signature=identity.sign(submission_bytes(named), domain="submission"))


def assignment(engines: RealEngines, identity: Identity) -> list[Submission]:
    """One assignment, answered honestly and signed."""
    choice = _choice(engines, identity.address)
    prompts = [engines.prompt_of(int(problem)) for problem in choice.problem_ids]
    answers = engines.worker_engine("honest").answer(prompts, [choice.sampling_seed + i for i in range(BATCH)])
    return [
        sign(
            Submission(
                identity.public_key, 0, 1, i, int(choice.problem_ids[i]), engines.checkpoint, a.tokens, a.logprobs,
                a.proofs,
            ),
            identity,
        )
        for i, a in enumerate(answers)
    ]  # fmt: skip


def _choice(engines: RealEngines, address: str) -> Choice:
    return choose_problems(address, step=0, counter=1, dataset_length=engines.problem_count, count=BATCH)


def try_submissions(
    engines: RealEngines,
    attack: str,
    own: list[Submission],
    others: list[Submission],
    soft: frozenset[str] = frozenset(),
) -> Judged:
    """Send what `attack` sends, one after another, to a new validator. `soft`: words that cost no stake."""
    fabric = LocalFabric(run_seed=1)
    records: list[RecordVerdict] = []
    ledger, worker, judge = (fabric.node(name) for name in ("ledger", "worker", "validator"))

    async def take(source: str, message: RecordVerdict) -> Account:
        records.append(message)
        return Account(message.public_key, 1000.0, 0.0, 0, 0, ejected=False)

    async def ask(source: str, message: AskAccount) -> Account:
        return Account(message.public_key, 1000.0, 0.0, 0, 0, ejected=False)

    def problem_of(address: str, submission: Submission) -> int | None:
        if (submission.step, submission.counter) != (0, 1) or not 0 <= submission.index < BATCH:
            return None
        return int(_choice(engines, address).problem_ids[submission.index])

    config = ValidatorConfig(
        ledger="ledger",
        checkpoint=engines.checkpoint,
        vocabulary=engines.vocabulary,
        answer_tokens_max=engines.agreement.answer_tokens_max,
        group=BATCH,
        grace_s=SUBMISSION_ATTACKS[attack].grace_s,
        soft=soft,
    )
    checker = engines.checker(SwarmPlan(run_seed=1, agreement=engines.agreement, assignments=1))
    me = Identity.from_seed(1, "validator")
    validator = Validator(judge, config, me, checker, engines.prompt_of, problem_of, silent)

    async def main() -> list[Any]:
        ledger.serve({RecordVerdict: take, AskAccount: ask})
        validator.serve()
        judge.spawn(validator.run(), "validator")
        sent = SUBMISSION_ATTACKS[attack].send(own, others, sign)
        verdicts = [await worker.call("validator", submission, 300.0) for submission in sent]
        await worker.sleep(3 * config.grace_s)
        validator.stop()
        return verdicts

    return _summed(fabric.run(main()), records)


def _summed(verdicts: Sequence[Verdict], records: Sequence[RecordVerdict]) -> Judged:
    accepted = [record.submission_id for record in records if record.accepted]
    return Judged(
        verdicts=tuple(verdicts),
        credited=len(accepted),
        credited_twice=len(accepted) - len(set(accepted)),
        slashed=frozenset(record.public_key for record in records if not record.accepted and record.hard),
        invalidated=frozenset(record.public_key for record in records if not record.accepted and not record.hard),
    )


def table(engines: RealEngines) -> Iterator[str]:
    """A row of Markdown for each attack: what it sends, the words it meets, what is credited."""
    own, others = assignment(engines, CHEAT), assignment(engines, HONEST)
    yield "| attack | what it does | saves | answers sent | words it meets | credited | its stake |"
    yield "| " + " | ".join(["---"] * 7) + " |"
    for name, line in SUBMISSION_ATTACKS.items():
        judged = try_submissions(engines, name, own, others)
        words = ", ".join(dict.fromkeys(verdict.code for verdict in judged.verdicts))
        mine = CHEAT.public_key
        stake = "slashed" if mine in judged.slashed else "kept, work not paid" if mine in judged.invalidated else "kept"
        what = (line.send.__doc__ or name).strip().rstrip(".")
        yield f"| {name} | {what} | {line.saves} | {len(judged.verdicts)} | {words} | {judged.credited} | {stake} |"
