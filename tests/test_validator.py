"""The validator: every check has its own word, a submission is judged once, and nothing a worker sends stops it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from refimpl.identity import Identity
from refimpl.messages import Account, AskAccount, RecordVerdict, Submission, submission_bytes
from refimpl.swarm import RealEngines, SwarmPlan
from refimpl.testnet.problems import choose_problems
from refimpl.toploc.check import REASONS
from refimpl.toploc.validator import CODES, Validator, ValidatorConfig
from refimpl.workshop import Agreement
from refimpl.world import Refused
from tests.paths import TINY_MODEL
from tests.worlds import sim_fabric

WORKER = Identity.from_seed(1, "worker")
STRANGER = Identity.from_seed(1, "stranger")
BATCH = 4


@pytest.fixture(scope="module")
def engines() -> RealEngines:
    return RealEngines(Agreement(model_path=str(TINY_MODEL), prompts="toy", batch=BATCH, answer_tokens_max=48))


@pytest.fixture(scope="module")
def honest(engines: RealEngines) -> list[Submission]:
    """An assignment answered honestly."""
    choice = choose_problems(WORKER.address, step=0, counter=1, dataset_length=engines.problem_count, count=BATCH)
    prompts = [engines.prompt_of(int(problem)) for problem in choice.problem_ids]
    answers = engines.worker_engine("honest").answer(prompts, [choice.sampling_seed + i for i in range(BATCH)])
    return [
        Submission(
            WORKER.public_key, 0, 1, i, int(choice.problem_ids[i]), engines.checkpoint, a.tokens, a.logprobs, a.proofs
        )
        for i, a in enumerate(answers)
    ]


def signed(submission: Submission, identity: Identity = WORKER) -> Submission:
    signature = identity.sign(submission_bytes(submission), domain="submission")
    return dataclasses.replace(submission, signature=signature)


class Court:
    """A validator on a simulated node, and a ledger that only takes notes."""

    def __init__(self, engines: RealEngines, checker: Any = None) -> None:
        self.fabric = sim_fabric(run_seed=1)
        self.records: list[RecordVerdict] = []
        self.events: list[str] = []
        worlds = {name: self.fabric.node(name) for name in ("ledger", "validator", "worker")}
        self.worker = worlds["worker"]

        self.ejected = False

        async def take(source: str, message: RecordVerdict) -> Account:
            self.records.append(message)
            return Account(message.public_key, 1000.0, 0.0, 0, 0, ejected=self.ejected)

        async def ask(source: str, message: AskAccount) -> Account:
            if message.public_key == STRANGER.public_key:
                raise Refused("there is no account")
            return Account(message.public_key, 1000.0, 0.0, 0, 0, ejected=self.ejected)

        worlds["ledger"].serve({RecordVerdict: take, AskAccount: ask})

        def problem_of(address: str, submission: Submission) -> int | None:
            if submission.step != 0 or submission.counter != 1 or not 0 <= submission.index < BATCH:
                return None
            choice = choose_problems(address, step=0, counter=1, dataset_length=engines.problem_count, count=BATCH)
            return int(choice.problem_ids[submission.index])

        plan = SwarmPlan(run_seed=1, agreement=engines.agreement, assignments=1)
        config = ValidatorConfig(
            ledger="ledger", checkpoint=engines.checkpoint, vocabulary=engines.vocabulary, answer_tokens_max=48
        )
        self.validator = Validator(
            worlds["validator"],
            config,
            Identity.from_seed(1, "validator"),
            checker or engines.checker(plan),
            engines.prompt_of,
            problem_of,
            self._note,
        )
        self.validator.serve()
        worlds["validator"].spawn(self.validator.run())

    def _note(self, kind: str, /, **fields: Any) -> None:
        self.events.append(kind)

    def judge(self, submissions: list[Submission]) -> list[Any]:
        async def main() -> list[Any]:
            return list(await self.worker.gather(*(self.worker.call("validator", s, 1000.0) for s in submissions)))

        return list(self.fabric.run(main()))


def test_an_honest_assignment_is_accepted_and_credited_by_its_tokens(
    engines: RealEngines, honest: list[Submission]
) -> None:
    court = Court(engines)
    verdicts = court.judge([signed(submission) for submission in honest])
    assert [verdict.code for verdict in verdicts] == ["ok"] * BATCH
    assert [record.units for record in court.records] == [float(len(s.tokens)) for s in honest]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "other weights claimed": ({"checkpoint": "f" * 64}, "wrong_checkpoint"),
    "another problem": ({"problem_id": 7}, "wrong_problem"),
    "an assignment never given": ({"counter": 2}, "wrong_problem"),
    "a counter of nothing": ({"counter": 0}, "wrong_problem"),
    "another step": ({"step": 5}, "wrong_problem"),
    "an index outside the batch": ({"index": 99}, "wrong_problem"),
    "no tokens": ({"tokens": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}, "bad_tokens"),
    "too many tokens": ({"tokens": np.zeros(49, np.int32), "logprobs": np.zeros(49, np.float32)}, "bad_tokens"),
    "a token outside the vocabulary": ({"tokens": np.full(40, 9999, np.int32)}, "bad_tokens"),
    "a negative token": ({"tokens": np.full(40, -1, np.int32)}, "bad_tokens"),
    "tokens of another type": ({"tokens": np.zeros(40, np.float64)}, "bad_tokens"),
    "a lone token without a list": (
        {"tokens": np.array(5, np.int32), "logprobs": np.array(-1, np.float32)},
        "bad_tokens",
    ),
    "tokens in a square": ({"tokens": np.zeros((4, 4), np.int32)}, "bad_tokens"),
    "too few log-probabilities": ({"logprobs": np.zeros(3, np.float32)}, "bad_logprobs"),
    "positive log-probabilities": ({"logprobs": None}, "bad_logprobs"),
    "no proofs": ({"proofs": ()}, "wrong_count"),
    "one proof too many": ({"proofs": "more"}, "wrong_count"),
    "an empty proof": ({"proofs": "empty"}, "malformed"),
    "a proof of zeros": ({"proofs": "zeros"}, "malformed"),
    "a trailing byte": ({"proofs": "trailing"}, "malformed"),
}


def changed(submission: Submission, change: dict[str, Any]) -> Submission:
    fields = dict(change)
    proofs = submission.proofs
    kinds = {
        "more": (*proofs, proofs[0]), "empty": (b"", *proofs[1:]), "zeros": (bytes(258), *proofs[1:]),
        "trailing": (proofs[0] + b"\x01", *proofs[1:]),
    }  # fmt: skip
    if isinstance(fields.get("proofs"), str):
        fields["proofs"] = kinds[fields["proofs"]]
    if "logprobs" in fields and fields["logprobs"] is None:
        fields["logprobs"] = np.full(submission.tokens.shape, 0.5, np.float32)
    return dataclasses.replace(submission, **fields)


@pytest.mark.parametrize("name", CHANGES)
def test_each_fault_has_its_own_word_and_is_slashed(engines: RealEngines, honest: list[Submission], name: str) -> None:
    change, code = CHANGES[name]
    court = Court(engines)
    bad, good = court.judge([signed(changed(honest[0], change)), signed(honest[1])])
    assert (bad.code, bad.accepted, bad.decided) == (code, False, True), bad.reason
    assert bad.reason
    assert good.accepted  # and its neighbour is judged as if nothing had been
    assert [(r.code, r.accepted) for r in court.records] == [(code, False), ("ok", True)]


def test_what_is_not_signed_by_the_key_it_names_convicts_nobody(engines: RealEngines, honest: list[Submission]) -> None:
    court = Court(engines)
    forger = Identity.from_seed(1, "forger")
    (verdict,) = court.judge([signed(honest[0], forger)])
    assert (verdict.code, verdict.decided) == ("bad_signature", False)
    assert court.records == []


def test_the_same_content_is_judged_once_and_gets_the_verdict_from_before(
    engines: RealEngines, honest: list[Submission]
) -> None:
    court = Court(engines)
    first, second = court.judge([signed(honest[0]), signed(honest[0])])
    (third,) = court.judge([signed(honest[0])])
    assert (first.duplicate, second.duplicate, third.duplicate) == (False, True, True)
    assert first.accepted and second.accepted and third.accepted
    assert len(court.records) == 1 and court.events.count("judged") == 1


def test_a_check_that_breaks_is_no_verdict_and_the_validator_lives_on(
    engines: RealEngines, honest: list[Submission]
) -> None:
    plan = SwarmPlan(run_seed=1, agreement=engines.agreement, assignments=1)
    real = engines.checker(plan)

    class Breaking:
        work = staticmethod(real.work)

        @staticmethod
        def precheck(submission: Submission) -> None:
            if submission.index == 0:
                raise RuntimeError("a bug in a check")

        @staticmethod
        def check(prompts: Any, submissions: Any) -> Iterator[Any]:
            return [MemoryError("out of memory") if s.index == 1 else o
                    for s, o in zip(submissions, real.check(prompts, submissions), strict=True)]  # fmt: skip

    court = Court(engines, Breaking())
    verdicts = court.judge([signed(submission) for submission in honest])
    assert [verdict.code for verdict in verdicts] == ["no_verdict", "no_verdict", "ok", "ok"]
    assert "RuntimeError: a bug in a check" in verdicts[0].reason
    assert [record.accepted for record in court.records] == [True, True]


def test_what_got_no_verdict_is_judged_when_it_is_sent_again(engines: RealEngines, honest: list[Submission]) -> None:
    real = engines.checker(SwarmPlan(run_seed=1, agreement=engines.agreement, assignments=1))

    class BreaksOnce:
        work, precheck = staticmethod(real.work), staticmethod(real.precheck)
        broken = 0

        def check(self, prompts: Any, submissions: Any) -> Any:
            self.broken += 1
            if self.broken <= 1:
                raise MemoryError("out of memory")
            return real.check(prompts, submissions)

    court = Court(engines, BreaksOnce())
    (first,) = court.judge([signed(honest[0])])
    assert (first.code, first.decided) == ("no_verdict", False) and court.records == []
    (second,) = court.judge([signed(honest[0])])
    assert (second.code, second.decided, second.duplicate) == ("ok", True, False)
    assert [record.accepted for record in court.records] == [True]


class _Forgetful(dict):  # type: ignore[type-arg]
    """A dict that never remembers."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return default


def test_ten_thousand_mutated_submissions_each_get_a_verdict_with_a_reason(
    engines: RealEngines, honest: list[Submission]
) -> None:
    rng = random.Random(0)
    court = Court(engines)

    def mutate(submission: Submission) -> Submission:
        name = rng.choice(["step", "counter", "index", "problem_id", "checkpoint", "tokens", "logprobs", "proofs"])
        if name in ("step", "counter", "index", "problem_id"):
            value: Any = rng.choice([-1, 0, 1, 2, 2**31, -(2**63), 2**63 - 1])
        elif name == "checkpoint":
            value = rng.choice(["", "x" * 1000, submission.checkpoint[:-1]])
        elif name in ("tokens", "logprobs"):
            dtype = rng.choice(["int32", "float32", "int64", "uint8", "float16"])
            shape = rng.choice([(), (1,), (3, 4), (rng.randrange(60),)])
            value = np.random.default_rng(rng.randrange(10**6)).random(shape) * 20
            value = np.asarray(value).astype(dtype)
            if dtype == "float32" and rng.random() < 0.5:
                value = value * np.float32("nan")
        else:
            proofs = [bytearray(proof) for proof in submission.proofs]
            for _ in range(rng.randrange(1, 4)):
                if proofs and rng.random() < 0.8:
                    victim = rng.choice(proofs)
                    if victim:
                        victim[rng.randrange(len(victim))] = rng.randrange(256)
                elif rng.random() < 0.5:
                    proofs.append(bytearray(rng.randbytes(rng.randrange(300))))
                elif proofs:
                    proofs.pop()
            value = tuple(map(bytes, proofs))
        return dataclasses.replace(submission, **{name: value})

    # each at a place of its own, since a place is judged once: the court gives out as many as it is asked for
    court.validator._slots = _Forgetful()
    verdicts = court.judge([signed(mutate(rng.choice(honest))) for _ in range(10_000)])
    assert all(verdict.reason and verdict.code in CODES for verdict in verdicts)
    assert sum(not verdict.accepted for verdict in verdicts) > 7500
    assert not court.fabric.failures
    assert court.judge([signed(honest[3])])[0].accepted


def test_one_place_of_an_assignment_is_paid_once_however_the_answer_is_dressed(
    engines: RealEngines, honest: list[Submission]
) -> None:
    court = Court(engines)
    dressed = [dataclasses.replace(honest[0], logprobs=honest[0].logprobs - np.float32(i) / 1000) for i in range(5)]
    verdicts = court.judge([signed(submission) for submission in dressed])
    assert [verdict.code for verdict in verdicts] == ["ok", *["second_answer"] * 4]
    assert not any(verdict.decided for verdict in verdicts[1:])
    assert len(court.records) == 1


def test_nothing_is_replayed_for_strangers_and_the_ejected(engines: RealEngines, honest: list[Submission]) -> None:
    court = Court(engines)
    strange = dataclasses.replace(honest[0], public_key=STRANGER.public_key)
    (verdict,) = court.judge([signed(strange, STRANGER)])
    assert (verdict.code, verdict.decided) == ("no_account", False)
    court.ejected = True
    assert court.judge([signed(honest[0])])[0].code == "no_account"
    assert "judged" not in court.events


def test_a_replay_that_breaks_for_one_gives_the_others_their_verdicts(
    engines: RealEngines, honest: list[Submission]
) -> None:
    plan = SwarmPlan(run_seed=1, agreement=engines.agreement, assignments=1)
    real = engines.checker(plan)

    class Breaking:
        work, precheck = staticmethod(real.work), staticmethod(real.precheck)

        @staticmethod
        def check(prompts: Any, submissions: Any) -> Any:
            if any(submission.index == 2 for submission in submissions):
                raise MemoryError("this one is too much")
            return real.check(prompts, submissions)

    verdicts = Court(engines, Breaking()).judge([signed(submission) for submission in honest])
    assert [verdict.code for verdict in verdicts] == ["ok", "ok", "no_verdict", "ok"]


def test_every_word_of_the_proof_check_is_a_word_of_the_validator() -> None:
    assert set(REASONS) - {"accepted", "nothing_to_check", "nonfinite_replay"} <= set(CODES)
