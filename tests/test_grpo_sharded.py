"""Sharded over two processes (FSDP), a step has the gradient of one process, whatever rows each was given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from refimpl.grpo.loss import LossConfig, grpo_loss
from refimpl.grpo.packing import PackedBatch, pack, share_rows
from refimpl.grpo.step import Policy
from refimpl.model.weights import random_decoder
from tests.test_grpo_step import MODEL, samples

RANKS = 2
LOSS = LossConfig(entropy_coef=0.01)


def backward(policy: Policy, batch: PackedBatch, denominator: float) -> None:
    logprob_N, entropy_N = policy(batch, 0.7)
    behaviour_N, advantage_N = batch.scored(batch.behaviour_BT), batch.scored(batch.advantage_BT)
    mask_N = torch.ones_like(logprob_N, dtype=torch.bool)
    grpo_loss(logprob_N, behaviour_N, advantage_N, mask_N, denominator, LOSS, entropy_S=entropy_N).loss.backward()


def one_rank(rank: int, meeting: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    decoder = random_decoder(MODEL, seed=5, std=0.3)
    policy = Policy(decoder)
    for layer in decoder.layers:
        fully_shard(layer)
    fully_shard(policy)
    ours = samples()
    shares = share_rows([[index] for index in range(len(ours))], [len(s) for s in ours], RANKS)
    tokens = sum(len(sample.answer) for sample in ours)
    for row in shares[rank]:  # seven rows on two ranks: one of them gets an empty one
        backward(policy, pack(ours, [row], width=18), tokens / RANKS)  # FSDP averages over ranks
    gradients = {name: parameter.grad.full_tensor() for name, parameter in policy.named_parameters()}  # type: ignore[union-attr]
    if rank == 0:
        torch.save(gradients, out)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available() or sys.platform != "linux", reason="needs torch's gloo back end")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    mp.spawn(one_rank, (str(tmp_path / "meeting"), str(tmp_path / "gradients")), RANKS)
    sharded = torch.load(tmp_path / "gradients", weights_only=True)
    policy = Policy(random_decoder(MODEL, seed=5, std=0.3))
    ours = samples()
    backward(policy, pack(ours, [[index] for index in range(len(ours))]), sum(len(sample.answer) for sample in ours))
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(sharded[name], parameter.grad, rtol=0, atol=1e-6)
