"""A trainer over several devices: its model sharded over as many processes (FSDP), all of which do the same.

The trainer's own process is rank 0 and leads: what its role asks of the student (`learn`, `save`, `load`), it tells the
others first. They are started with it and end with it. `accelerate` finds each process its device and its back end;
`fully_shard` is the call that accelerate's FSDP makes on GPUs, made here directly, since accelerate refuses it on CPUs.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from refimpl.grpo.rollout import Sample
from refimpl.grpo.step import Policy
from refimpl.model.transformer import Decoder
from refimpl.work import Work

BETWEEN_STEPS = timedelta(days=7)
"""How long the others wait for the first process to say what is next: a batch may take its time."""


class Shards:
    """`whole` (in host memory, in every process) and its sharded copy, which is what is trained."""

    def __init__(self, whole: Decoder, state: PartialState) -> None:
        self.whole, self.rank, self.ranks = whole, int(state.process_index), int(state.num_processes)
        sharded = copy.deepcopy(whole).to(state.device)
        for parameter in sharded.parameters():
            parameter.requires_grad_(True)
        self.policy = Policy(sharded)
        for layer in sharded.layers:
            fully_shard(layer)
        fully_shard(self.policy)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, DTensor]]:
        for name, parameter in self.policy.decoder.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            yield self.whole.get_parameter(name).detach(), parameter

    @torch.no_grad()
    def gather(self) -> None:
        """`whole` becomes what is trained. All ranks must call it."""
        for target, parameter in self._pairs():
            target.copy_(parameter.full_tensor())

    @torch.no_grad()
    def scatter(self) -> None:
        """What is trained becomes `whole`. All ranks must call it."""
        for source, parameter in self._pairs():
            parameter.copy_(distribute_tensor(source.to(parameter.device), parameter.device_mesh, parameter.placements))


class Student(Protocol):
    def learn(self, samples: Sequence[Sample]) -> dict[str, Any]: ...

    def work(self, samples: Sequence[Sample]) -> Work: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Leader:
    """Rank 0's student, for the trainer's role: whatever it does, the others do too."""

    def __init__(self, student: Student) -> None:
        self.student = student

    def learn(self, samples: Sequence[Sample]) -> dict[str, Any]:
        _tell("learn", samples)
        return self.student.learn(samples)

    def work(self, samples: Sequence[Sample]) -> Work:
        return self.student.work(samples)

    def save(self, folder: Path) -> None:
        _tell("save", folder)
        self.student.save(folder)

    def load(self, folder: Path) -> None:
        _tell("load", folder)
        self.student.load(folder)

    def close(self) -> None:
        _tell("end", None)


def follow(student: Student) -> None:
    """Another rank's part: do what the first does, until it ends."""
    while True:
        order: list[Any] = [None]
        broadcast_object_list(order, from_process=0)
        what, argument = order[0]
        if what == "end":
            return
        getattr(student, what)(argument)


def _tell(what: str, argument: Any) -> None:
    broadcast_object_list([(what, argument)], from_process=0)


@contextmanager
def group(rank: int, ranks: int, port: int) -> Iterator[PartialState]:
    """Be one of `ranks` processes on this machine, on GPUs where each has one."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    state = PartialState(cpu=torch.cuda.device_count() < ranks, timeout=BETWEEN_STEPS)
    try:
        yield state
    finally:
        state.destroy_process_group()


@contextmanager
def helpers(packed_plan: dict[str, Any], ranks: int) -> Iterator[int]:
    """The processes of ranks 1 and up, for as long as this lasts; gives the port at which they meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    children = []
    try:
        for rank in range(1, ranks):
            config = {"plan": packed_plan, "rank": rank, "ranks": ranks, "port": port}
            packed = base64.b64encode(json.dumps(config).encode()).decode()
            command = [sys.executable, "-m", "refimpl.training", "rank", packed]
            children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield port
    finally:
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=10)
            child.kill()
            child.wait()
