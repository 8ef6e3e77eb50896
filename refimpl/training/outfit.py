"""What the roles of a run work with. `RealOutfit`: a model, a task, files on a disk. The simulator has another, of
stand-ins (`sim/kinds/training_standin.py`); the roles and how they are wired (`seats.py`) are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from refimpl.grpo.trainer import Records, Student
from refimpl.grpo.validator import Inspector
from refimpl.grpo.vault import Vault
from refimpl.grpo.worker import Maker
from refimpl.identity import verify
from refimpl.messages import Blob
from refimpl.model.config import ModelConfig
from refimpl.shardcast.disk_store import DiskStore
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Manifest
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import Store
from refimpl.training.bench import Bench, BenchInspector, Score
from refimpl.training.cheats import maker_of
from refimpl.training.plain import student_of
from refimpl.training.plan import TrainPlan
from refimpl.training.shards import Leader, group, helpers
from refimpl.training.weights import Arrivals, Found, cut_folder, mark_of, tensors_of


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What a node generates and checks with."""

    maker: Maker
    inspector: Inspector


class Outfit(Protocol):
    """Made once for a node of a real run, or for all nodes of a simulated one."""

    @property
    def serving(self) -> ServingConfig:
        """On what terms weights are served; whom to tell, and how many versions stay, is the run's."""
        ...

    def student(self, plan: TrainPlan) -> AbstractContextManager[Student]: ...

    def records(self, plan: TrainPlan, node: str, folder: Path) -> Records: ...

    def tools(self, plan: TrainPlan, node: str, arrivals: Arrivals) -> AbstractContextManager[Tools]: ...

    def store(self, node: str, folder: Path, origin_key: str) -> tuple[Store, Found]:
        """The node's store, and what is in it from before."""
        ...

    def cut(self, version: int, folder: Path) -> tuple[Layout, Any]:
        """What the origin publishes of a checkpoint."""
        ...

    def checkpoint_of(self, plan: TrainPlan, store: Store, manifest: Manifest) -> int: ...

    def key_of(self, file: Blob) -> str:
        """The name that a rollout file's content gives it; RolloutError where it has none."""
        ...


class RealOutfit:
    """`score`: None: by locked-down processes."""

    def __init__(self, *, score: Score | None = None) -> None:
        self.score = score
        self.serving = ServingConfig()

    @contextmanager
    def student(self, plan: TrainPlan) -> Iterator[Student]:
        bench = Bench(plan, score=self.score)  # to evaluate with
        try:
            ranks = plan.trainer_processes
            if ranks == 1:
                yield student_of(plan, bench)
                return
            with helpers(plan.as_json(), ranks) as port, group(0, ranks, port) as state:
                leader = Leader(student_of(plan, bench, state))
                try:
                    yield leader
                finally:
                    leader.close()
        finally:
            bench.close()

    def records(self, plan: TrainPlan, node: str, folder: Path) -> Vault:
        limits = plan.limits(ModelConfig.from_pretrained(plan.model_path).vocabulary)
        return Vault(folder / "run", plan.run_id, keep=plan.max_age + 3, limits=limits)

    @contextmanager
    def tools(self, plan: TrainPlan, node: str, arrivals: Arrivals) -> Iterator[Tools]:
        bench = Bench(plan, tensors=partial(tensors_of, arrivals), score=self.score)
        bench.version = -1  # its weights are those that arrive, version 0 too
        try:
            maker = maker_of(dict(plan.cheats).get(node, "honest"), bench)
            yield Tools(maker=maker, inspector=BenchInspector(bench))
        finally:
            bench.close()

    def store(self, node: str, folder: Path, origin_key: str) -> tuple[Store, Found]:
        root = folder / "shardcast"
        root.mkdir(parents=True, exist_ok=True)
        store = DiskStore(root, link=True)
        return store, store.found(verify, origin_key)

    def cut(self, version: int, folder: Path) -> tuple[Layout, Any]:
        return cut_folder(version, folder)

    def checkpoint_of(self, plan: TrainPlan, store: Store, manifest: Manifest) -> int:
        return mark_of(store, manifest, run_id=plan.run_id)

    def key_of(self, file: Blob) -> str:
        return Vault.key_of(file)
