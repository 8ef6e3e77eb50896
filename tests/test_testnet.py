"""The problem rule, the ledger's arithmetic, and the roles around them, with right values."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from refimpl.calls import Patience
from refimpl.identity import Identity
from refimpl.messages import (
    Account,
    AskAccount,
    AskWork,
    Later,
    Ok,
    RecordVerdict,
    Register,
    Submission,
    Verdict,
    question_bytes,
    record_bytes,
)
from refimpl.testnet.ledger import LedgerError, LedgerRules, MemoryLedger
from refimpl.testnet.liveness import LivenessConfig, NodeTable
from refimpl.testnet.orchestrator import QUESTION, Orchestrator, OrchestratorConfig
from refimpl.testnet.problems import choose_problems
from refimpl.testnet.registry import RECORD, REGISTRATION, Registry, RegistryConfig, registration_bytes
from refimpl.testnet.worker import Worker, WorkerConfig
from refimpl.work import Seconds
from refimpl.world import Refused
from tests.worlds import sim_fabric


# ------------------------------------------------------------------------------------------------------ problem rule
def test_problem_choice_gives_the_vectors_of_the_original_rule() -> None:
    """default_rng(address · counter + step): integers(0, n, count), then integers(2^32) from the same stream."""
    choice = choose_problems("0x1", step=5, counter=1, dataset_length=1000, count=4)
    assert choice.problem_ids.tolist() == [445, 538, 517, 343]
    assert choice.sampling_seed == 4063638511
    address = "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266"
    choice = choose_problems(address, step=7, counter=1, dataset_length=285_000, count=16)
    assert choice.problem_ids[:4].tolist() == [216775, 266709, 1414, 142181]
    assert choice.sampling_seed == 4172377535


def test_the_papers_rule_swaps_the_factors() -> None:
    a = choose_problems("0x3", step=5, counter=2, dataset_length=1000, count=4, rule="paper")
    b = choose_problems("0x3", step=2, counter=5, dataset_length=1000, count=4, rule="code")
    np.testing.assert_array_equal(a.problem_ids, b.problem_ids)


def test_bad_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="counter 1 or more"):
        choose_problems("0x1", step=0, counter=0, dataset_length=10, count=1)
    with pytest.raises(ValueError, match="the data set has 0 problems"):
        choose_problems("0x1", step=0, counter=1, dataset_length=0, count=1)


# ------------------------------------------------------------------------------------------------------------ ledger
RULES = LedgerRules(stake_minimum=500, reward_per_unit=0.01, penalty=200, rejections_to_eject=2)


def test_rewards_are_units_times_rate_and_one_submission_counts_once() -> None:
    ledger = MemoryLedger(RULES)
    ledger.open_account("k", 1000)
    assert ledger.credit("k", "s1", 48) is True
    assert ledger.credit("k", "s1", 48) is False
    assert ledger.slash("k", "s1") is False  # judged already, the other way
    account = ledger.account("k")
    assert (account.earned, account.stake, account.accepted, account.rejected) == (pytest.approx(0.48), 1000, 1, 0)


def test_slashing_takes_the_penalty_never_more_than_there_is_and_ejects_at_the_bound() -> None:
    ledger = MemoryLedger(RULES)
    ledger.open_account("k", 500)
    ledger.credit("k", "good", 100)
    ledger.slash("k", "b1")
    assert not ledger.account("k").ejected and ledger.account("k").earned == 1.0
    ledger.slash("k", "b2")
    account = ledger.account("k")
    assert (account.stake, account.slashed, account.ejected) == (100, 400, True)
    assert (account.earned, account.forfeited) == (0.0, 1.0)
    ledger.slash("k", "b3")
    assert (account.stake, account.slashed) == (0, 500)
    assert ledger.credit("k", "late", 100) is False and account.earned == 0.0  # in flight: judged, not paid


def test_the_ledger_refuses_small_stakes_unknown_accounts_and_negative_units() -> None:
    ledger = MemoryLedger(RULES)
    with pytest.raises(LedgerError, match="a stake of 499 was offered, at least 500 is needed"):
        ledger.open_account("k", 499)
    with pytest.raises(LedgerError, match="there is no account k"):
        ledger.account("k")
    ledger.open_account("k", 500)
    ledger.open_account("k", 10_000)  # again: changes nothing
    assert ledger.account("k").stake == 500
    with pytest.raises(LedgerError, match="-1 units cannot be credited"):
        ledger.credit("k", "s", -1)
    with pytest.raises(ValueError, match="ledger.penalty is -1"):
        LedgerRules(penalty=-1)


# ------------------------------------------------------------------------------------------------------------- roles
def swarm() -> tuple[Any, Any, Identity]:
    fabric = sim_fabric(run_seed=1)
    names = ("ledger", "orchestrator", "validator", "worker")
    worlds = {name: fabric.node(name) for name in names}
    Registry(
        worlds["ledger"], RegistryConfig(validators=frozenset({VALIDATOR.public_key})), MemoryLedger(RULES)
    ).serve()
    config = OrchestratorConfig(ledger="ledger", dataset_length=1000, batch=4, assignments=2)
    Orchestrator(worlds["orchestrator"], config).serve()
    return fabric, worlds, Identity.from_seed(1, "worker")


VALIDATOR = Identity.from_seed(1, "validator")


def record(key: str, submission: str, accepted: bool, units: float, by: Identity = VALIDATOR) -> RecordVerdict:
    unsigned = RecordVerdict(key, submission, accepted, "ok" if accepted else "drift", units, by.public_key)
    return replace(unsigned, signature=by.sign(record_bytes(unsigned), domain=RECORD))


def question(identity: Identity, number: int) -> AskWork:
    unsigned = AskWork(identity.public_key, number)
    return replace(unsigned, signature=identity.sign(question_bytes(unsigned), domain=QUESTION))


def registration(identity: Identity, stake: float = 1000.0) -> Register:
    signed = registration_bytes(identity.public_key, stake)
    return Register(identity.public_key, stake, identity.sign(signed, domain=REGISTRATION))


def test_an_account_is_opened_by_its_own_key_only() -> None:
    fabric, worlds, identity = swarm()
    other = Identity.from_seed(1, "other")
    forged = Register(identity.public_key, 1000.0, registration(other).signature)

    async def main() -> None:
        with pytest.raises(Refused, match="not signed by the key"):
            await worlds["worker"].call("ledger", forged, 10)
        with pytest.raises(Refused, match="64 lower-case hex digits"):
            await worlds["worker"].call("ledger", Register("xyz", 1000.0, b""), 10)
        assert await worlds["worker"].call("ledger", registration(identity), 10) == Ok()
        assert await worlds["worker"].call("ledger", registration(identity), 10) == Ok()  # may be said twice

    fabric.run(main())


def test_only_validators_record_verdicts() -> None:
    fabric, worlds, identity = swarm()
    key = identity.public_key

    async def main() -> None:
        await worlds["worker"].call("ledger", registration(identity), 10)
        with pytest.raises(Refused, match="is not a validator of this ledger"):
            await worlds["validator"].call("ledger", record(key, "s", True, 1e9, by=identity), 10)  # the right name
        forged = replace(record(key, "s", True, 50.0), units=1e9)
        with pytest.raises(Refused, match="not signed by the validator that it names"):
            await worlds["validator"].call("ledger", forged, 10)
        account = await worlds["worker"].call("ledger", record(key, "s", True, 50.0), 10)  # the key counts
        assert account == Account(key, 1000.0, 0.5, 1, 0, ejected=False)

    fabric.run(main())


def test_assignments_follow_the_rule_end_and_stop_for_the_ejected() -> None:
    fabric, worlds, identity = swarm()
    key = identity.public_key

    async def main() -> None:
        worker = worlds["worker"]
        with pytest.raises(Refused, match="there is no account"):
            await worker.call("orchestrator", question(identity, 1), 10)
        await worker.call("ledger", registration(identity), 10)
        first = await worker.call("orchestrator", question(identity, 1), 10)
        expected = choose_problems(identity.address, step=0, counter=1, dataset_length=1000, count=4)
        assert first.problem_ids.tolist() == expected.problem_ids.tolist()
        assert (first.sampling_seed, first.counter, first.done) == (expected.sampling_seed, 1, False)
        again = await worker.call("orchestrator", question(identity, 1), 10)
        assert again.counter == 1  # the reply may have been lost: the same question, the same answer
        stolen = replace(question(Identity.from_seed(1, "thief"), 2), public_key=key)
        with pytest.raises(Refused, match="not signed by the key"):
            await worker.call("orchestrator", stolen, 10)
        assert (await worker.call("orchestrator", question(identity, 2), 10)).counter == 2
        with pytest.raises(Refused, match="question 1 is older than question 2"):
            await worker.call("orchestrator", question(identity, 1), 10)
        assert (await worker.call("orchestrator", question(identity, 3), 10)).done
        for submission in ("b1", "b2"):
            await worlds["validator"].call("ledger", record(key, submission, False, 0.0), 10)
        assert (await worker.call("ledger", AskAccount(key), 10)).ejected
        with pytest.raises(Refused, match="this account was ejected"):
            await worker.call("orchestrator", question(identity, 4), 10)

    fabric.run(main())


# ---------------------------------------------------------------------------------------------------------- liveness
def table_after(beats_s: list[float], passes_s: list[float]) -> list[tuple[float, str]]:
    """States of one node, as (time, state) at each move."""
    table = NodeTable(LivenessConfig())
    moves = []
    for now_s, kind in sorted([(t, "beat") for t in beats_s] + [(t, "pass") for t in passes_s]):
        changes = [table.beat("n", now_s)] if kind == "beat" else table.status_pass(now_s)
        moves += [(now_s, change.after.value) for change in changes if change is not None]
    return moves


def test_a_crashed_node_is_dead_120_to_150_s_after_its_last_beat() -> None:
    """Beat every 10 s with a life of 90 s, a pass every 15 s, three misses."""
    for phase_s in range(0, 15):
        beats = [10.0 * i for i in range(7)]  # the last at 60 s
        moves = table_after(beats, [phase_s + 15.0 * i for i in range(20)])
        assert [state for _, state in moves] == ["healthy", "unhealthy", "dead"]
        assert 120 <= moves[-1][0] - 60.0 <= 150, (phase_s, moves)


def test_one_lost_beat_is_forgiven_and_a_node_that_comes_back_is_healthy() -> None:
    assert table_after([0, 80, 160], [15.0 * i for i in range(15)]) == [(0, "healthy")]
    moves = table_after([0, 300], [15.0 * i for i in range(30)])
    assert [state for _, state in moves][:4] == ["healthy", "unhealthy", "dead", "healthy"]


def test_the_dead_do_not_hide_the_stale() -> None:
    table = NodeTable(LivenessConfig(ttl_s=10, misses_max=1))
    table.beat("a", 0.0)
    for now_s in (11.0, 12.0):
        table.status_pass(now_s)
    table.beat("b", 13.0)
    assert table.state("a") == "dead" and table.counts()["dead"] == 1
    assert [change.node for change in table.status_pass(30.0)] == ["b"]
    assert table.state("nobody") is None


def test_an_invited_node_that_never_beats_becomes_unhealthy_then_dead() -> None:
    table = NodeTable(LivenessConfig())
    table.invite("n", 0.0)
    states = []
    for i in range(1, 16):
        states += [change.after.value for change in table.status_pass(15.0 * i)]
    assert states == ["unhealthy", "dead"]


# ------------------------------------------------------------------------------------------------------------ worker
class _Engine:
    """Answers with one token per prompt."""

    def answer(self, prompts: Any, seeds: Any) -> list[Any]:
        return [
            SimpleNamespace(tokens=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), proofs=()) for _ in seeds
        ]

    def work(self, prompts: Any, answers: Any) -> Seconds:
        return Seconds(duration_s=1.0)


def test_a_worker_that_is_cut_off_for_long_goes_on_when_it_can_and_is_never_taken_for_dismissed() -> None:
    fabric, worlds, identity = swarm()
    judged: list[int] = []
    notes: list[str] = []

    async def accept(source: str, message: Submission) -> Verdict:
        judged.append(message.counter)
        return Verdict("id", True, "ok", "fine")

    worlds["validator"].serve({Submission: accept})
    config = WorkerConfig(
        orchestrator="orchestrator", validator="validator", ledger="ledger", checkpoint="c",
        patience=Patience(timeout_s=5.0, attempts=3, wait_s=1.0, wait_s_max=4.0),
    )  # fmt: skip
    worker = Worker(
        worlds["worker"], config, identity, _Engine(), lambda problem: [1], lambda kind, /, **fields: notes.append(kind)
    )

    async def main() -> None:
        index = worlds["worker"].index
        fabric.network.set_link_state(0.0, working=False, node=index)
        worlds["validator"].spawn(worker.run())
        await worlds["ledger"].sleep(3000.0)
        assert judged == [] and "cut_off" in notes
        fabric.network.set_link_state(3000.0, working=True, node=index)
        await worlds["ledger"].sleep(100.0)

    fabric.run(main())
    assert judged == [1] * 4 + [2] * 4  # two assignments of four problems each
    assert "dismissed" not in notes


def test_an_orchestrator_that_cannot_ask_the_ledger_says_later_and_convicts_nobody() -> None:
    fabric, worlds, identity = swarm()

    async def main() -> None:
        await worlds["worker"].call("ledger", registration(identity), 10)
        fabric.kill("ledger")
        reply = await worlds["worker"].call("orchestrator", question(identity, 1), 100)
        assert isinstance(reply, Later) and "the ledger did not answer" in reply.reason

    fabric.run(main())
    assert not fabric.failures
