"""Why: a price list is only as good as the clock behind it. This file times the real model, piece by piece.

It measures what `refimpl.work` names: prompt passes, decoding steps, training steps, proofs, their checks, hashing; and
beside them the machine's own peaks and the model's matrix products alone, so that a fit can tell reading weights from
the interpreter's overhead. What is made of the samples is not decided here.

The clock is read only after the device has finished (an asynchronous queue makes anything look ten times too fast).
Points are visited in rounds, each point once a round, so that a slow minute of the machine falls on all of them, and
the best of the rounds counts: what the machine does when nothing else disturbs it. How far the median lay above it says
how much was disturbed. On a machine that others use too, one thread and its own processor time ("thread" clock) are the
steadier measure; on a quiet one, wall time and all cores.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F

from refimpl.model.transformer import Decoder, linear
from refimpl.model.weights import load_decoder
from refimpl.toploc.check import verify_proofs
from refimpl.toploc.proof import build_proofs
from refimpl.work import ModelSize

Clock = Literal["wall", "thread"]
Kind = Literal["prefill", "decode", "products", "train", "prove", "verify", "hash"]
TRAIN_TOKENS_PER_SEQUENCE = 128
SHORT_S = 0.1  # what takes less is repeated within a round until this is spent
SHORT_REPEATS_MAX = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What to time. `tokens`: of the prompt (prefill), already cached (decode), through the matrices (products), in all
    (train, prove, verify), bytes (hash). `layers`: so many of the first layers (0: the whole model). `hidden`: width of
    the activations that are proven."""

    kind: Kind
    batch: int = 1
    tokens: int = 0
    layers: int = 0
    hidden: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A point, its best time, and by how much the median was above it: 0.5 is half as long again."""

    point: Point
    seconds: float
    disturbance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The device that was measured, with the peaks it reached itself."""

    device: str  # "cpu", "cuda"
    processor: str
    memory_bytes: float
    peak_flop_per_s: float  # bf16 product of two square matrices
    bandwidth_bytes_per_s: float  # the better of summing and of a matrix-vector product
    engine: str
    threads: int
    clock: Clock
    load_average: float


class Stopwatch:
    """Times a function on one device by one clock."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        if clock == "thread" and (device.type != "cpu" or torch.get_num_threads() != 1):
            raise ValueError(f"clock 'thread' needs device cpu and 1 thread; got {device}, {torch.get_num_threads()}")
        self._device = device
        self._now = time.perf_counter if clock == "wall" else time.thread_time

    def seconds(self, run: Callable[[], object]) -> float:
        self._finish()
        begin = self._now()
        run()
        self._finish()
        return self._now() - begin

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Bench:
    """The model and the clock; `measure` visits points in rounds."""

    def __init__(self, model_path: str | Path, *, device: str, threads: int, clock: Clock) -> None:
        torch.set_num_threads(threads)
        self.decoder = load_decoder(model_path, device=device)
        self.device = self.decoder.device
        self.threads, self.clock = threads, clock
        self._path = Path(model_path)
        self._watch = Stopwatch(self.device, clock)
        self._parts: dict[int, Decoder] = {0: self.decoder}
        self._optimizer: torch.optim.Optimizer | None = None
        self._generator = torch.Generator().manual_seed(20)

    def size(self, layers: int = 0) -> ModelSize:
        """Sizes of the whole model, or of its first layers."""
        return self.decoder.config.size(range(layers) if layers else None)

    def measure(
        self, points: Sequence[Point], *, rounds: int, progress: Callable[[int, int], None] | None = None
    ) -> list[Sample]:
        """Each point's best over `rounds`, after one run to warm up. `progress` is told (done, in all)."""
        runs = [self._prepare(point) for point in points]
        times: list[list[float]] = [[] for _ in points]
        for run in runs:
            run()
        for lap in range(rounds):
            for i, run in enumerate(runs):
                first_s = self._watch.seconds(run)
                again = min(int(SHORT_S / first_s), SHORT_REPEATS_MAX)
                times[i] += [first_s, *(self._watch.seconds(run) for _ in range(again))]
                if progress is not None:
                    progress(lap * len(runs) + i + 1, rounds * len(runs))
        return [
            Sample(point=point, seconds=min(each), disturbance=median(each) / min(each) - 1)
            for point, each in zip(points, times, strict=True)
        ]

    def machine(self) -> Machine:
        """The device and its peaks, measured now."""
        square, long = (4096, 1 << 29) if self.device.type == "cuda" else (1024, 1 << 26)
        a = torch.randn(square, square, dtype=torch.bfloat16, device=self.device)
        x = torch.zeros(long, device=self.device)
        matrix, vector = x.view(-1, 8192), torch.zeros(8192, device=self.device)
        read_s = min(self._best(lambda: x.sum(), 5), self._best(lambda: matrix @ vector, 5))
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}" if self.device.type == "cpu" else "eager"
        return Machine(
            device=self.device.type,
            processor=_processor(self.device),
            memory_bytes=_memory_bytes(self.device),
            peak_flop_per_s=2 * square**3 / self._best(lambda: a @ a, 20),
            bandwidth_bytes_per_s=4 * long / read_s,
            engine=f"refimpl Decoder bf16, {self.decoder.attention}, torch {torch.__version__}, {threads}",
            threads=self.threads,
            clock=self.clock,
            load_average=os.getloadavg()[0],
        )

    def _best(self, run: Callable[[], object], rounds: int) -> float:
        run()
        return min(self._watch.seconds(run) for _ in range(rounds))

    # ---- one point each

    def _prepare(self, point: Point) -> Callable[[], object]:
        prepare = {
            "prefill": self._prefill,
            "decode": self._decode,
            "products": self._products,
            "train": self._train,
            "prove": self._prove,
            "verify": self._verify,
            "hash": self._hash,
        }[point.kind]
        return prepare(point)

    def _ids(self, batch: int, tokens: int) -> torch.Tensor:
        vocabulary = self.decoder.config.vocabulary
        return torch.randint(vocabulary, (batch, tokens), generator=self._generator).to(self.device)

    def _prefill(self, point: Point) -> Callable[[], object]:
        """A prompt into an empty cache, hidden states only."""
        ids = self._ids(point.batch, point.tokens)

        def run() -> None:
            with torch.inference_mode():
                self.decoder(ids, self.decoder.new_cache(batch=point.batch, capacity=point.tokens))

        return run

    def _decode(self, point: Point) -> Callable[[], object]:
        """One token for each sequence, with logits where the part has the head."""
        decoder = self._part(point.layers)
        ids = self._ids(point.batch, 1)
        cache = decoder.new_cache(batch=point.batch, capacity=point.tokens + 1)

        def run() -> None:
            cache.lengths[:] = point.tokens
            with torch.inference_mode():
                hidden_B1D = decoder(ids, cache)
                if decoder.head is not None:
                    decoder.logits(hidden_B1D[:, -1])

        return run

    def _part(self, layers: int) -> Decoder:
        if layers not in self._parts:
            self._parts[layers] = load_decoder(self._path, layers=range(layers), device=str(self.device))
        return self._parts[layers]

    def _products(self, point: Point) -> Callable[[], object]:
        """The matrix products of all layers and of the head, nothing else."""
        matrices = [getattr(layer, name) for layer in self.decoder.layers for name in MATRICES]
        matrices.append(self.decoder.head)
        inputs = {m.shape[1]: torch.randn(point.tokens, m.shape[1]).to(m.dtype).to(m.device) for m in matrices}

        def run() -> None:
            with torch.inference_mode():
                for matrix in matrices:
                    linear(inputs[matrix.shape[1]], matrix, None)

        return run

    def _train(self, point: Point) -> Callable[[], object]:
        """Forward, backward and one AdamW update over `tokens` tokens in sequences of `TRAIN_TOKENS_PER_SEQUENCE`. No
        weight moves: the learning rate is 0."""
        length = min(TRAIN_TOKENS_PER_SEQUENCE, point.tokens)
        ids = self._ids(point.tokens // length, length)
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(self.decoder.parameters(), lr=0.0, weight_decay=0.0)
        optimizer = self._optimizer

        def run() -> None:
            logits_BTV = self.decoder.logits(self.decoder(ids))
            F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    def _states(self, point: Point) -> torch.Tensor:
        return torch.randn(point.tokens, point.hidden, generator=self._generator).to(torch.bfloat16).to(self.device)

    def _prove(self, point: Point) -> Callable[[], object]:
        states = self._states(point)
        return lambda: build_proofs(states)

    def _verify(self, point: Point) -> Callable[[], object]:
        states = self._states(point)
        proofs = [proof.encode() for proof in build_proofs(states)]
        return lambda: verify_proofs(states, proofs)

    def _hash(self, point: Point) -> Callable[[], object]:
        data = os.urandom(
            point.tokens
        )  # touched: untouched pages are all one page, in the cache, and hash 1.6 times faster
        return lambda: hashlib.sha256(data).digest()


MATRICES = ("qkv", "output", "gate_up", "down")


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
