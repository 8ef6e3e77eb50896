"""Why: what the roles of training work with where no model runs: answers of drawn lengths and rewards, files that are
only a size and a note, verdicts from measured scores, a checkpoint that is only a size.

A file's note says who made it, of which slot, with which weights; lengths and rewards follow from the slot's own seed,
so that worker, validator and trainer see the same rows without passing any. Everything that decides (problems, seeds,
targets, advantages, the checks of rows and rewards, the rule for scores) is the real thing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refimpl.grpo.messages import Offer, SlotGiven
from refimpl.grpo.rollout import RolloutError, Sample
from refimpl.grpo.staleness import Trained, Unit
from refimpl.grpo.unit import Brief, Question, brief, check_rewards, check_rows, unit_samples
from refimpl.grpo.validator import Finding
from refimpl.identity import address_of
from refimpl.messages import Blob
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.limits import ServingLimits
from refimpl.shardcast.manifest import Manifest
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import MemoryStore, Store, endless, virtual_shards
from refimpl.testnet.problems import choose_problems
from refimpl.toploc.check import PRESETS, judge
from refimpl.training.outfit import Tools
from refimpl.training.plan import TrainPlan
from refimpl.training.prices import check_work, generate_work, step_work
from refimpl.training.student import batch_figures
from refimpl.training.weights import Arrivals, Found
from refimpl.work import ModelSize, Work
from sim.calibrated import CHUNK_TOKENS, PROOF_BYTES, drawn, load_table
from sim.model_sizes import MODEL_SIZES
from sim.training_part import TrainingPart

END = 1  # the end token; every other one is a 0
NOTE = "rollouts"
BYTES_PER_TOKEN = 8  # an id and a log-probability
KEPT = 512  # files whose rows are kept
UNLIMITED = ServingLimits(bytes_per_s=1e15, burst_bytes=1e15, transfers_per_client=10_000, transfers=1_000_000)


@dataclass(frozen=True)
class Note:
    """What a virtual file says of itself."""

    behaviour: str
    folder: int
    place: int
    version: int

    def file(self, rows: Sequence[Sample]) -> Blob:
        tokens = sum(len(row.output_tokens) for row in rows)
        proofs = sum(-(-len(row.output_tokens) // CHUNK_TOKENS) for row in rows) * PROOF_BYTES
        prompts = 4 * sum(len(row.input_tokens) for row in rows)
        content = json.dumps([NOTE, self.behaviour, self.folder, self.place, self.version])
        return Blob(prompts + BYTES_PER_TOKEN * tokens + proofs, content)

    @classmethod
    def of(cls, file: Blob) -> Note:
        try:
            kind, *fields = json.loads(file.content_id)
        except ValueError:
            kind, fields = "", []
        if kind != NOTE:
            raise RolloutError("not a rollout file: it was changed on its way")
        return cls(*fields)


@dataclass(frozen=True)
class _Answer:
    tokens: np.ndarray
    logprobs: np.ndarray
    proofs: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class VirtualUnit:
    """A unit that was just generated."""

    key: str
    file: Blob
    rows: Sequence[Sample]
    tokens: int


class StandIns:
    """`refimpl.training.outfit.Outfit` for all nodes of a simulated run. `at_once`: answers that each worker's device
    holds in its cache; `behaviours`: of the workers."""

    def __init__(
        self, part: TrainingPart, plan: TrainPlan, at_once: Mapping[str, int], behaviours: Mapping[str, str]
    ) -> None:
        self.part, self.plan, self.rules = part, plan, plan.rules
        self.at_once, self.behaviours = at_once, behaviours
        self.size: ModelSize = MODEL_SIZES[part.size]
        self.table, self.thresholds = load_table(part.table), PRESETS[part.thresholds]
        self.serving = ServingConfig(limits=UNLIMITED, hold_s=1.0, virtual=True)
        self.disks: dict[str, MemoryRecords] = {}  # of trainers: they outlive a crash
        self._stores: dict[str, MemoryStore] = {}
        self._tokens = np.zeros(part.answer_tokens_max, np.int32)
        self._tokens[-1] = END
        self._logprobs = np.zeros(part.answer_tokens_max, np.float32)
        self._prompt = (2,) * part.prompt_tokens
        self._rows: dict[Note, list[Sample]] = {}
        address = address_of(plan.identity(plan.trainer).public_key)
        self._choose = lambda folder, place: choose_problems(
            address, step=folder, counter=place + 1, dataset_length=plan.dataset_length, count=self.rules.problems
        )

    # ---- what a slot decides

    def brief(self, folder: int, place: int) -> Brief:
        choice = self._choose(folder, place)
        questions = [
            Question(problem_id=str(index), task="stand-in", text="", prompt=self._prompt)
            for index in choice.problem_ids
        ]
        return brief(questions, choice.sampling_seed, self.rules)

    def _draw(self, folder: int, place: int, targets: Sequence[int]) -> tuple[list[int], list[float]]:
        """Answer lengths and task rewards of a slot: by its seed, and the solve rate of each problem by its number."""
        choice, part = self._choose(folder, place), self.part
        rng = np.random.Generator(np.random.PCG64([choice.sampling_seed, 1]))
        spread = np.exp(part.length_sigma * rng.standard_normal(self.rules.rows))
        lengths = np.clip(np.rint(np.asarray(targets) * spread), 1, part.answer_tokens_max).astype(int)
        low, high = part.solve_rate_least, part.solve_rate_most
        rates = [
            low + (high - low) * np.random.Generator(np.random.PCG64([int(index), 2])).random()
            for index in choice.problem_ids
        ]
        solved = rng.random(self.rules.rows) < np.repeat(rates, self.rules.group)
        return lengths.tolist(), solved.astype(float).tolist()

    def rows(self, note: Note) -> list[Sample]:
        """The rows of a file; the same for whoever reads it."""
        if note not in self._rows:
            asked = self.brief(note.folder, note.place)
            lengths, rewards = self._draw(note.folder, note.place, asked.targets)
            answers = [self._answer(length) for length in lengths]
            texts = [""] * len(answers)
            self._rows[note] = unit_samples(asked, answers, texts, rewards, note.version, self.rules)
            while len(self._rows) > KEPT:
                self._rows.pop(next(iter(self._rows)))
        return self._rows[note]

    def _answer(self, length: int) -> _Answer:
        """Ends with the end token unless it is as long as an answer may be; a view of one shared array."""
        tokens = self._tokens[len(self._tokens) - length :]
        return _Answer(tokens, self._logprobs[:length])

    # ---- the outfit

    @contextmanager
    def student(self, plan: TrainPlan) -> Iterator[StandInStudent]:
        yield StandInStudent(self.size, self.part.optimizer_steps)

    def records(self, plan: TrainPlan, node: str, folder: Path) -> MemoryRecords:
        return self.disks.setdefault(node, MemoryRecords(self, keep=plan.max_age + 3))

    @contextmanager
    def tools(self, plan: TrainPlan, node: str, arrivals: Arrivals) -> Iterator[Tools]:
        behaviour = self.behaviours.get(node, "honest")
        maker = StandInMaker(self, behaviour, self.at_once.get(node))
        yield Tools(maker=maker, inspector=StandInInspector(self))

    def store(self, node: str, folder: Path, origin_key: str) -> tuple[Store, Found]:
        """The trainer's outlives a crash; others come back with an empty disk."""
        if node != self.plan.trainer:
            return MemoryStore(), ([], [])
        store = self._stores.setdefault(node, MemoryStore())
        store.reopen(endless)
        return store, (store.found(), [])

    def cut(self, version: int, folder: Path) -> tuple[Layout, Any]:
        size_bytes, shard_bytes = round(self.part.checkpoint_gb * 1e9), round(self.part.shard_mb * 1e6)
        layout = Layout(names=(f"step_{version}",), sizes_bytes=(size_bytes,), shard_bytes=shard_bytes)
        return layout, virtual_shards(f"checkpoint {version}", layout)

    def checkpoint_of(self, plan: TrainPlan, store: Store, manifest: Manifest) -> int:
        return int(manifest.layout.names[0].removeprefix("step_"))

    def key_of(self, file: Blob) -> str:
        return hashlib.sha256(file.content_id.encode()).hexdigest()


class StandInMaker:
    """`refimpl.grpo.worker.Maker` of a worker of one behaviour."""

    def __init__(self, outfit: StandIns, behaviour: str, at_once: int | None) -> None:
        self.outfit, self.behaviour, self.at_once = outfit, behaviour, at_once

    def make(self, slot: SlotGiven, public_key: str, version: int) -> VirtualUnit:
        note = Note(self.behaviour, slot.folder, slot.place, version)
        rows = self.outfit.rows(note)
        file = note.file(rows)
        tokens = sum(len(row.output_tokens) for row in rows)
        return VirtualUnit(key=self.outfit.key_of(file), file=file, rows=rows, tokens=tokens)

    def work(self, made: VirtualUnit) -> Work:
        lengths = [len(row.output_tokens) for row in made.rows]
        return generate_work(self.outfit.size, self.outfit.part.prompt_tokens, lengths, at_once=self.at_once)


class StandInInspector:
    """`refimpl.grpo.validator.Inspector`: the real checks of rows and rewards, and the real rule on measured scores."""

    def __init__(self, outfit: StandIns) -> None:
        self.outfit = outfit

    def version_of(self, offer: Offer) -> int | None:
        try:
            return Note.of(offer.file).version
        except RolloutError:
            return None

    def inspect(self, offer: Offer) -> Finding:
        outfit, slot = self.outfit, offer.slot
        try:
            note = Note.of(offer.file)
        except RolloutError as error:
            return Finding(code="bad_file", reason=str(error))
        rows, asked = outfit.rows(note), outfit.brief(slot.folder, slot.place)
        tokens = sum(len(row.output_tokens) for row in rows)
        versions = range(slot.checkpoint, slot.folder + 1)
        wrong = check_rows(rows, asked, outfit.rules, versions=versions, ends={END})
        if wrong is None:
            rewards = outfit._draw(slot.folder, slot.place, asked.targets)[1]
            wrong = check_rewards(rows, asked, rewards, outfit.rules) or self._check_proofs(note, rows)
        if wrong is not None:
            return Finding(code=wrong[0], reason=wrong[1], rows=len(rows), tokens=tokens)
        return Finding(code="ok", reason="", rows=len(rows), tokens=tokens)

    def _check_proofs(self, note: Note, rows: Sequence[Sample]) -> tuple[str, str] | None:
        """Each row draws, by its seed, a submission that was measured with this behaviour."""
        measured = self.outfit.table[note.behaviour]
        for index, row in enumerate(rows):
            assert row.seed is not None
            seen = measured[drawn(row.seed, len(measured))]
            if not seen.chunks:
                return "bad_proof", f"row {index}: {seen.code}"
            verdict = judge(seen.chunks, self.outfit.thresholds)
            if not verdict.accepted and not verdict.undecided:
                return "bad_proof", f"row {index}: {verdict.reason}"
        return None

    def work(self, finding: Finding) -> Work:
        return check_work(self.outfit.size, finding.rows, finding.tokens, self.outfit.part.prompt_tokens)


class StandInStudent:
    """`refimpl.grpo.trainer.Student` that learns nothing, in the time that learning takes."""

    def __init__(self, size: ModelSize, optimizer_steps: int) -> None:
        self.size, self.optimizer_steps = size, optimizer_steps

    def learn(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return batch_figures(samples)

    def work(self, samples: Sequence[Sample]) -> Work:
        return step_work(self.size, samples, self.optimizer_steps)

    def save(self, folder: Path) -> None:
        """There is nothing to save."""

    def load(self, folder: Path) -> None:
        """There is nothing to load."""


class MemoryRecords:
    """`refimpl.grpo.trainer.Records` in memory: a disk that outlives its node's process."""

    def __init__(self, outfit: StandIns, *, keep: int) -> None:
        self.outfit, self.keep = outfit, keep
        self._units: dict[str, tuple[Unit, Blob]] = {}  # in the order in which they were taken
        self._books: dict[int, str] = {}
        self._trained: list[tuple[int, list[tuple[str, int]]]] = []

    def key_of(self, file: Blob) -> str:
        return self.outfit.key_of(file)

    def read(self, file: Blob) -> list[Sample]:
        return self.outfit.rows(Note.of(file))

    def accept(self, unit: Unit, file: Blob) -> None:
        self._units[unit.key] = (unit, file)

    def accepted(self) -> list[Unit]:
        return [unit for unit, _ in self._units.values()]

    def rollouts(self, unit: Unit) -> list[Sample]:
        return self.read(self._units[unit.key][1])

    def save(self, version: int, books: dict[str, Any], write: Callable[[Path], None]) -> Path:
        write(self.folder(version))
        self._books[version] = json.dumps(books)
        for old in self.versions()[: -self.keep]:
            del self._books[old]
        oldest = self.versions()[0]
        self._units = {key: kept for key, kept in self._units.items() if kept[0].slot.folder >= oldest}
        return self.folder(version)

    def versions(self) -> list[int]:
        return sorted(self._books)

    def folder(self, version: int) -> Path:
        return Path(f"step_{version}")

    def books(self, version: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._books[version])
        return found

    def log_trained(self, version: int, units: Sequence[Unit]) -> None:
        self._trained.append((version, [(unit.key, unit.oldest_version) for unit in units]))

    def trained(self) -> list[Trained]:
        return [
            Trained(version=version, key=key, oldest_version=oldest)
            for version, units in self._trained
            for key, oldest in units
        ]

    def forget_trained(self, version: int) -> None:
        self._trained = [line for line in self._trained if line[0] < version]
