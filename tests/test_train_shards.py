"""The trainer's model over two processes: "a 2-process CPU run equals one process", to float noise, and so do its
checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from refimpl.grpo.rollout import Sample
from refimpl.grpo.vault import STATE, WEIGHTS
from refimpl.training.plain import student_of
from refimpl.training.plan import TrainPlan
from refimpl.training.shards import Leader, follow, group
from tests.shardcast_processes import free_port
from tests.training_run import small_plan

RANKS = 2
VERSIONS = 3


def plan() -> TrainPlan:
    """Two optimizer steps a version, so that log-probabilities are shared between ranks too; a KL, to a reference that
    is sharded as well."""
    return small_plan(optimizer_steps=2, online_filter=True, learning_rate=1e-4, warm_up_steps=0, kl_coef=0.1)


def batch(version: int) -> list[Sample]:
    """Eleven answers of ragged lengths to three prompts; two carry no signal."""
    rng = np.random.default_rng(version)
    rows = []
    for index in range(11):
        prompt = np.arange(3, 8 + index // 4, dtype=np.int32)
        answer = rng.integers(3, 12, rng.integers(1, 7)).astype(np.int32)
        rows.append(
            Sample(
                input_tokens=prompt,
                output_tokens=answer,
                output_logprobs=rng.normal(-2.0, 0.3, len(answer)).astype(np.float32),
                advantage=0.0 if index in (2, 7) else float(rng.normal()),
                step=version,
            )
        )
    return rows


def train(student: Any, folder: Path) -> list[dict[str, Any]]:
    """Learn, save, forget, load, and learn on."""
    figures = [student.learn(batch(version)) for version in range(VERSIONS - 1)]
    folder.mkdir()
    student.save(folder)
    student.learn(batch(99))  # to be undone
    student.load(folder)
    figures.append(student.learn(batch(VERSIONS - 1)))
    student.save(folder)
    return figures


def one_rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    with group(rank, RANKS, port) as state:
        student = student_of(plan(), None, state)
        if rank:
            follow(student)
            return
        leader = Leader(student)
        torch.save(train(leader, Path(folder)), Path(folder) / "figures")
        leader.close()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available() or sys.platform != "linux", reason="needs torch's gloo back end")
def test_two_processes_learn_what_one_learns_and_their_checkpoints_are_its(tmp_path: Path) -> None:
    mp.spawn(one_rank, (free_port(), str(tmp_path / "two")), RANKS)
    alone = student_of(plan(), None)
    figures = train(alone, tmp_path / "one")
    for ours, theirs in zip(figures, torch.load(tmp_path / "two" / "figures"), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    one, two = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "two"))
    off = torch.cat([(two[name] - tensor).abs().flatten() for name, tensor in one.items()])
    # AdamW divides by a gradient's size: where that is near its ε, float noise moves a weight by a part of a step
    assert (off > 1e-5).double().mean() < 1e-3 and off.max() < 2e-4
    state = torch.load(tmp_path / "two" / STATE, weights_only=True)  # one process goes on where two stopped
    alone.load(tmp_path / "two")
    assert alone.version == VERSIONS and state["steps_applied"] == 2 * VERSIONS
    alone.learn(batch(VERSIONS))
