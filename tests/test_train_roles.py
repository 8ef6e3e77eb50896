"""Worker, validator and trainer over the port, weights by SHARDCAST: the run that nobody waits in is the plain one."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from refimpl.grpo import vault as vault_module
from refimpl.grpo.vault import WEIGHTS, Vault, VaultError
from refimpl.tasks.scorer import own_rewards
from refimpl.training.plain import PlainRun, run_plain
from refimpl.training.plan import TrainPlan
from refimpl.worlds.local import LocalFabric
from tests.training_run import TrainingRun, small_plan

_PLAIN: dict[str, PlainRun] = {}


def plain(plan: TrainPlan) -> PlainRun:
    """Made once for all tests that compare with it."""
    return (
        _PLAIN.setdefault(repr(plan), run_plain(plan, score=own_rewards))
        if repr(plan) not in _PLAIN
        else _PLAIN[repr(plan)]
    )


def differs(run: TrainingRun) -> str:
    """The first tensor that the run's last checkpoint and the plain loop disagree about, by a single bit."""
    trained = load_file(run.trainer.vault.folder(run.plan.steps) / WEIGHTS)
    return next((n for n, tensor in plain(run.plan).weights.items() if not torch.equal(trained[n], tensor)), "")


def check_promises(run: TrainingRun) -> None:
    """Nothing trained twice, too old or out of turn; and all that was acknowledged was trained."""
    assert run.trainer.broken_promises() == []
    acknowledged = {note["key"] for note in run.of("taken", verdict="accepted")}
    trained = [unit.key for unit in run.trainer.vault.trained()]
    assert set(trained) == acknowledged and len(trained) == len(set(trained))
    published = [note["checkpoint"] for note in run.of("out")]
    assert sorted(set(published)) == list(range(run.plan.steps + 1)), "a version was left out"


@pytest.mark.parametrize("max_age", [0, 2])
def test_the_asynchronous_run_equals_the_plain_one_bit_for_bit(max_age: int, tmp_path: Path) -> None:
    """k = 0 is the synchronous run; and whatever k, who did what when changes nothing."""
    run = TrainingRun(small_plan(max_age=max_age, steps=4), tmp_path)
    run.run(run.finish())
    assert not run.of("version_skipped")
    assert differs(run) == ""
    log = run.trainer.vault.trained()
    assert [[unit.key for unit in log if unit.version == v] for v in range(4)] == plain(run.plan).keys
    assert [unit.version - unit.oldest_version for unit in log] == [min(v, max_age) for v in range(4) for _ in range(2)]
    check_promises(run)
    assert {note["node"] for note in run.of("generated")} == set(run.plan.workers)  # both took part


def test_the_same_roles_in_wall_clock_time(tmp_path: Path) -> None:
    run = TrainingRun(small_plan(steps=2), tmp_path, LocalFabric(run_seed=0))
    run.run(run.finish())
    check_promises(run)


def test_with_a_lag_generation_and_training_overlap(tmp_path: Path) -> None:
    """k = 0 costs a unit, a check and a step each version, one after another; k = 2 costs the slowest of them."""
    spent = {}
    for max_age in (0, 2):
        run = TrainingRun(small_plan(max_age=max_age, steps=6), tmp_path / str(max_age))
        run.run(run.finish())
        spent[max_age] = run.desk.now()
    assert spent[0] >= 6 * (0.7 + 0.2 + 1.0)
    assert spent[2] <= 6 * 1.0 + 3.0


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_a_killed_node_costs_time_and_nothing_else(seed: int, tmp_path: Path) -> None:
    """Trainer, relay, validator, worker in turn, at a moment drawn with the seed: the run goes on, and ends with the
    very weights of the run in which nobody was killed."""
    rng = np.random.default_rng(seed)
    plan = small_plan(max_age=[0, 2][seed // 4 % 2], steps=4)
    run = TrainingRun(plan, tmp_path)
    victim = ("trainer", "relay", "validator", "worker-0")[seed % 4]

    async def main() -> None:
        await run.desk.sleep(float(rng.uniform(0.05, 5.0)))
        if not run.of("finished"):
            run.kill(victim)
            await run.desk.sleep(float(rng.uniform(0.0, 3.0)))
            run.start(victim)
        await run.finish()

    run.run(main())
    check_promises(run)
    if not run.of("version_skipped"):  # a client that comes back with an empty disk gets the newest weights only
        assert differs(run) == ""


@pytest.mark.parametrize("kl_coef", [0.0, 1.0])
def test_a_run_that_ended_in_the_middle_is_taken_up_where_it_was(kl_coef: float, tmp_path: Path) -> None:
    """Everything is killed after two versions and started anew: ids and weights are those of one run. A KL is still
    taken to the checkpoint that it was begun with."""
    plan = small_plan(steps=4, max_age=0, kl_coef=kl_coef)
    first = TrainingRun(plan, tmp_path)

    async def half() -> None:
        await first.until(lambda: first.of("trained", version=2))
        for name in first.lives:
            first.kill(name)

    first.run(half())
    second = TrainingRun(plan, tmp_path)
    second.lives = first.lives
    second.run(second.finish())
    assert [note["version"] for note in second.of("trained")] == [3, 4]
    assert differs(second) == ""
    log = second.trainer.vault.trained()
    assert [[unit.key for unit in log if unit.version == v] for v in range(4)] == plain(plan).keys
    assert second.trainer.broken_promises() == []


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [("rewards-inverted", "wrong_reward"), ("noise", "wrong_reward"), ("weights-stale", "bad_proof")],
)
def test_a_cheat_is_named_gets_no_more_slots_and_trains_nothing(behaviour: str, code: str, tmp_path: Path) -> None:
    plan = small_plan(steps=4, cheats=(("worker-1", behaviour),), learning_rate=1e-2)
    run = TrainingRun(plan, tmp_path)
    run.run(run.finish())
    denied = run.of("denied")
    key = plan.identity("worker-1").public_key
    assert [(note["worker"], note["code"]) for note in denied] == [(key, code)]
    check_promises(run)
    assert differs(run) == "", "a place that a cheat lost is filled by another with the very same unit"


def test_without_a_verifier_the_cheat_is_trained(tmp_path: Path) -> None:
    plan = small_plan(cheats=(("worker-1", "rewards-inverted"),), verify=False)
    run = TrainingRun(plan, tmp_path)
    run.run(run.finish())
    assert not run.of("denied")
    assert differs(run) != ""


@pytest.mark.parametrize("fails", ["json", "parquet", "sync"])
def test_a_file_that_the_disk_does_not_take_counts_for_nothing(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two are refused, with the reason; their places are filled by others, and nothing of them is left."""
    left, write, tried = [2], vault_module._write, []

    def full(path: Path, data: bytes) -> None:
        if (
            path.parent.parent.name != "accepted"
            or not left[0]
            or path.suffix != f".{fails.replace('sync', 'parquet')}"
        ):
            write(path, data)
            return
        left[0] -= 1
        tried.append(path)
        if fails == "sync":  # the rename is done, and may not last
            write(path, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(vault_module, "_write", full)
    run = TrainingRun(small_plan(steps=2), tmp_path)

    async def main() -> None:
        await run.until(lambda: len(tried) == 2)
        assert not any(path.exists() for path in tried)
        await run.finish()

    run.run(main())
    check_promises(run)
    assert differs(run) == ""
    refused = run.of("not_kept")
    assert len(refused) == 2 and all("No space left on device" in note["reason"] for note in refused)
    told = [note["reason"] for note in run.of("judgement", code="no_verdict")]
    assert len(told) == 2 and all("could not be kept" in reason for reason in told)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    Vault(tmp_path, "train-0", keep=2)
    Vault(tmp_path, "train-0", keep=2)
    with pytest.raises(VaultError, match="belongs to run 'train-0', this is run 'train-7'"):
        Vault(tmp_path, "train-7", keep=2)
