"""Makes what the arena judges: for each behaviour the same sequences, as this behaviour answers them.

All attacks get the same prompts and seeds, so a cell differs from another by the behaviour alone; each kind of honest
worker has its own, so that honest answers count as so many independent ones. Sequences are made a batch at a time and
kept in a folder that is named after the code which made them: a run that is ended goes on where it was, one of changed
code begins anew. `deal` is what one batch holds.

Shapes: n tokens of one answer, D hidden.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refimpl.arena.verifier import Case, Opened, open_answers
from refimpl.attacks.catalogue import ATTACKS, engine_of
from refimpl.attacks.honest import HONEST
from refimpl.engine import Completion
from refimpl.model.sampler import Sampling
from refimpl.model.transformer import Decoder
from refimpl.toploc.proof import build_proofs
from refimpl.work import Work
from refimpl.workshop import Agreement, BoundEngine, Workshop

ROOT = Path(__file__).parents[2]
RECOMPUTED = "recomputed"
"""What the verifier itself generates when it checks by doing everything again: in batches of another size."""
CALIBRATION = 100_000
"""First index of the sequences that limits are calibrated on; those that are judged count from 0."""
SEED = 1_000_000  # of sequence 0
APART = 10_000  # first indices of two kinds of honest workers


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, a task, a rule of sampling, and how many sequences a cell has."""

    name: str
    model_path: Path
    prompts: str
    tokens_max: int
    temperature: float
    top_p: float
    batch: int
    sequences: int  # a cell
    honest_sequences: int  # in each honest cell
    calibration_sequences: int  # in each honest cell, apart from those judged
    counts: Mapping[str, int] = field(default_factory=dict)  # of single behaviours, where it is another

    def count(self, behaviour: str) -> int:
        """Sequences of this behaviour's cell."""
        return self.counts.get(behaviour, self.sequences if behaviour in ATTACKS else self.honest_sequences)

    def agreement(self) -> Agreement:
        return Agreement(
            model_path=str(self.model_path),
            prompts=self.prompts,
            batch=self.batch,
            answer_tokens_max=self.tokens_max,
            temperature=self.temperature,
            top_p=self.top_p,
        )


SETTINGS: dict[str, Setting] = {
    "tiny": Setting(
        name="tiny",
        model_path=ROOT / "tests" / "data" / "tiny-model",
        prompts="toy",
        tokens_max=64,
        temperature=2.0,
        top_p=0.95,
        batch=100,
        sequences=100,
        honest_sequences=200,
        calibration_sequences=100,
    ),
    "smollm2": Setting(
        name="smollm2",
        model_path=ROOT / "models" / "SmolLM2-135M-Instruct",
        prompts="instructions",
        tokens_max=128,
        temperature=0.8,
        top_p=0.95,
        batch=64,
        sequences=32,
        honest_sequences=160,
        calibration_sequences=64,
        counts={
            "honest": 192,
            "honest-batch1": 32,  # slow
            RECOMPUTED: 64,
            "weights-4bit": 192,  # a rate is claimed of these
            "layers-skipped": 192,
            "other-checkpoint": 192,
            "prompt-altered": 192,
            "wrong-seed": 192,
            "greedy": 192,
            "cheap-tokens": 320,
        },
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sent:
    """One answer as it was handed in, with the states that its commitments are made from."""

    index: int
    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    states: torch.Tensor  # bf16 [n, D]
    cheated: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What one call of a behaviour's engine gave."""

    sent: tuple[Sent, ...]
    work: Work  # what it would cost on a real device
    cpu_s: float  # what it cost here


Recall = Callable[[Sequence[Sequence[int]], Sequence[int]], list[Any] | None]
"""(prompts, seeds) -> what the agreed engine answered them, where it did already."""


class Remembering(BoundEngine):
    """The agreed engine, which need not answer twice what it answered before: many attacks begin with that."""

    recall: Recall
    agreed: Sampling

    def answer(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Any]:
        known = self.recall(prompts, seeds) if self.sampling == self.agreed else None
        return super().answer(prompts, seeds) if known is None else known


class ArenaShop(Workshop):
    """A workshop whose engines keep their states: commitments of every kind are made from them."""

    def __init__(self, agreement: Agreement, recall: Recall) -> None:
        super().__init__(agreement)
        self.recall = recall

    def engine(self, decoder: Decoder, *, batch: int | None = None, **options: Any) -> BoundEngine:
        options |= {"keep_states": True}
        made = super().engine(decoder, batch=batch, **options)
        if decoder is self.decoder() and batch is None and set(options) == {"keep_states"}:
            remembering = Remembering(
                made.engine, sampling=made.sampling, answer_tokens_max=made.answer_tokens_max, batch=made.batch
            )
            remembering.recall, remembering.agreed = self.recall, self.sampling
            return remembering
        return made


class Bench:
    """The sequences of one setting, made when first asked for."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder = setting, folder / setting.name

    @cached_property
    def shop(self) -> Workshop:
        return ArenaShop(self.setting.agreement(), self._recall)

    def _recall(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Any] | None:
        """The kept honest batch with these prompts and seeds; None if there is none."""
        batch: Batch | None = load(self.place("honest") / f"{seeds[0] - SEED}.pt") if len(seeds) else None
        if batch is None or len(batch.sent) < len(seeds):
            return None
        sent = batch.sent[: len(seeds)]
        if [self.seed(one.index) for one in sent] != list(seeds):
            return None
        if [self.prompt(one.index) for one in sent] != [list(prompt) for prompt in prompts]:
            return None
        mode, ends = self.shop.agreement.proof_mode, self.shop.decoder().config.eos_ids
        return [
            Completion(
                tokens=one.tokens,
                logprobs=one.logprobs,
                proofs=tuple(proof.encode() for proof in build_proofs(one.states, mode=mode)),
                finished="eos" if one.tokens[-1] in ends else "length",
                states=one.states,
            )
            for one in sent
        ]

    def prompt(self, index: int) -> Sequence[int]:
        """Sequence `index`'s prompt: problems in an order that spreads over the set."""
        return self.shop.prompt_of(index * 37 % self.shop.problem_count)

    def seed(self, index: int) -> int:
        return SEED + index

    def engine(self, behaviour: str) -> Any:
        """A new engine of this behaviour. Its parts that cost something (changed weights) are made once."""
        if behaviour == RECOMPUTED:
            return self.shop.engine(self.shop.decoder(), batch=max(1, self.setting.batch // 2 + 1))
        if behaviour in HONEST:
            return HONEST[behaviour](self.shop)
        return engine_of(behaviour)(self.shop)

    def edit(self, behaviour: str) -> Any:
        """What this behaviour does to commitments, of whatever kind, before they are sent; None: nothing."""
        return getattr(ATTACKS[behaviour].engine(self.shop), "edit", None) if behaviour in ATTACKS else None

    def place(self, behaviour: str) -> Path:
        """Where a behaviour's sequences are kept, as long as the code that makes them stays as it is."""
        return self.folder / behaviour / code_of(behaviour)

    def _starts(self, behaviour: str, count: int, first: int) -> range:
        """Indices at which batches begin."""
        first += APART * list(HONEST).index(behaviour) if behaviour in HONEST else 0
        return range(first, first + count, self.setting.batch)

    def made(self, behaviour: str, count: int, first: int = 0) -> bool:
        """Whether all these sequences are in the folder."""
        return all((self.place(behaviour) / f"{at}.pt").exists() for at in self._starts(behaviour, count, first))

    def batches(self, behaviour: str, count: int, first: int = 0) -> Iterator[Batch]:
        """`count` sequences of this behaviour, a batch at a time, from the folder where they are there."""
        size, starts = self.setting.batch, self._starts(behaviour, count, first)
        for at in starts:
            path = self.place(behaviour) / f"{at}.pt"
            wanted = min(size, starts.stop - at)
            batch: Batch | None = load(path)
            if batch is None or len(batch.sent) < wanted:
                batch = self.deal(behaviour, range(at, at + wanted))
                save(path, batch)
            yield Batch(sent=batch.sent[:wanted], work=batch.work, cpu_s=batch.cpu_s)

    def deal(self, behaviour: str, indices: Sequence[int]) -> Batch:
        """One batch, made now."""
        engine = self.engine(behaviour)
        prompts = [self.prompt(index) for index in indices]
        began = time.process_time()
        answers = engine.answer(prompts, [self.seed(index) for index in indices])
        cpu_s = time.process_time() - began
        cheated = getattr(engine, "cheated", [behaviour in ATTACKS] * len(answers))
        sent = tuple(
            Sent(index=i, tokens=a.tokens, logprobs=a.logprobs, states=a.states, cheated=bool(c))
            for i, a, c in zip(indices, answers, cheated, strict=True)
        )
        return Batch(sent=sent, work=engine.work(prompts, answers), cpu_s=cpu_s)

    # ------------------------------------------------------------------------------------------- the verifier's side
    def cases(self, behaviour: str, count: int, first: int = 0) -> Iterator[tuple[Sent, Case]]:
        """Each answer beside what the verifier sees of it. The verifier replays a batch at a time, as bf16 prefill."""
        for batch in self.batches(behaviour, count, first):
            opened = self._opened(batch)
            yield from ((sent, self.case(sent, one)) for sent, one in zip(batch.sent, opened, strict=True))

    def _opened(self, batch: Batch) -> list[Opened]:
        path = self.folder / "opened" / f"{_digest(batch)}.pt"
        opened: list[Opened] | None = load(path)
        if opened is None:
            prompts = [self.prompt(sent.index) for sent in batch.sent]
            replays = self.verifier.replay(prompts, [sent.tokens for sent in batch.sent])
            opened = open_answers(replays, [self.seed(sent.index) for sent in batch.sent], self.shop.sampling)
            save(path, opened)
        return opened

    @cached_property
    def verifier(self) -> BoundEngine:
        """The right model in bf16, all answers of a batch in one pass: other shapes than any prover's."""
        return self.shop.engine(self.shop.decoder())

    @cached_property
    def recomputed(self) -> dict[int, np.ndarray]:
        """The verifier's own answers, by sequence: for those that were made."""
        found: dict[int, np.ndarray] = {}
        for path in sorted(self.place(RECOMPUTED).glob("*.pt")):
            batch = load(path)
            assert isinstance(batch, Batch)
            found |= {sent.index: sent.tokens for sent in batch.sent}
        return found

    def case(self, sent: Sent, opened: Opened) -> Case:
        """What the verifier sees of one answer."""
        return Case(
            tokens=sent.tokens,
            seed=self.seed(sent.index),
            sampling=self.shop.sampling,
            tokens_max=self.setting.tokens_max,
            eos_ids=frozenset(self.shop.decoder().config.eos_ids),
            opened=opened,
            recomputed=self.recomputed.get(sent.index),
            replay_again=lambda: self.verifier.replay([self.prompt(sent.index)], [sent.tokens])[0],
        )


@cache
def sources(*patterns: str) -> bytes:
    """The text of all files of this package with such names."""
    paths = [path for pattern in patterns for path in sorted((ROOT / "refimpl").glob(pattern))]
    return b"".join(path.read_bytes() for path in paths)


@cache
def code_of(behaviour: str) -> str:
    """Names the code that makes a behaviour's answers."""
    attacks = ("attacks/*.py",) if behaviour in ATTACKS else ("attacks/honest.py",)
    return hashlib.sha256(sources("model/*.py", "engine.py", "workshop.py", *attacks)).hexdigest()[:12]


def _digest(batch: Batch) -> str:
    """Names what one prefill says of a batch: by what was claimed, and by the code that reads logits. Behaviours that
    claim the same tokens share it."""
    found = hashlib.sha256(sources("model/*.py", "engine.py", "toploc/one_pass.py"))
    for sent in batch.sent:
        found.update(f"{sent.index},{len(sent.tokens)};".encode() + sent.tokens.astype(np.int32).tobytes())
    return found.hexdigest()[:24]


def load(path: Path) -> Any:
    """What was saved there; None if nothing was."""
    return torch.load(path, weights_only=False) if path.exists() else None  # our own file


def save(path: Path, content: Any) -> None:
    """Whole or not at all: a run may be ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    torch.save(content, partial)
    partial.rename(path)
