"""Why: a simulator whose prices nobody checked is a story. This measures the machine it runs on, fits, and is tested.

    python -m sim.hardware --calibrate

times the real model on this machine (`refimpl/measure.py`), fits the six rates of a pass (arithmetic and reading in
matrix products, how far they overlap, attention, what lies between the products, overhead of a layer) by least squares
on the logarithm of the error, and then predicts batch sizes and lengths that were left out of the fit. Training,
proving, checking and hashing have one or two rates each, fitted alone, and a point left out as well. The table says
measured, predicted, error; the exit status is 1 when a held-out point is off by more than the bound. The profile it
writes is a device that a scenario can name (`device = "this-machine"`).
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from refimpl.measure import TRAIN_TOKENS_PER_SEQUENCE, Bench, Clock, Machine, Point, Sample
from refimpl.work import Backward, Forward, Hash, ModelSize, Prove, Verify, Work
from sim import roofline
from sim.calibration_report import Calibration, Line, report
from sim.catalogue import ComputeFigure, DeviceEntry, Figure, Rate, load_catalogue
from sim.hardware import GB, THIS_MACHINE_PROFILE, Device, device_from_entry
from sim.profile import Origin, PassTable, Phase, Profile, dump_profile

ERROR_MAX = 0.15  # of a held-out point
FITTED = ("prefill", "decode", "attention", "activation", "overhead_layer_s")  # and overlap
PRIOR_WEIGHT = 0.02  # pulls a rate that the samples say nothing about to its start, and moves the others by nothing
RATE_RANGE = (1e-3, 1e3)  # of a fitted rate against its start
DEFAULT_MODEL = Path("models/SmolLM2-135M-Instruct")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which points are fitted, and which are held out."""

    decode_batch: tuple[int, ...]
    decode_tokens: tuple[int, ...]
    prefill_batch: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    products_tokens: tuple[int, ...]
    part_layers: tuple[int, ...]
    held_out: tuple[Point, ...]
    train_tokens: tuple[int, int, int]  # the middle one is held out
    proof_hidden: tuple[int, int, int]  # the middle one is held out
    proof_tokens: int = 2048
    hash_bytes: int = 100_000_000  # more than a cache holds: what is hashed comes from memory


FULL = Plan(
    decode_batch=(1, 4, 16),
    decode_tokens=(32, 256, 1024),
    prefill_batch=(1, 4, 8),
    prefill_tokens=(32, 128, 512),
    products_tokens=(1, 16, 128, 1024),
    part_layers=(10, 20),
    held_out=(
        Point(kind="decode", batch=2, tokens=96),
        Point(kind="decode", batch=6, tokens=640),
        Point(kind="decode", batch=12, tokens=512),
        Point(kind="prefill", batch=1, tokens=768),
        Point(kind="prefill", batch=2, tokens=320),
        Point(kind="prefill", batch=6, tokens=96),
    ),
    train_tokens=(128, 256, 512),
    proof_hidden=(576, 2048, 4096),
)
SMALL = Plan(
    decode_batch=(1, 8),
    decode_tokens=(16, 192),
    prefill_batch=(1, 4),
    prefill_tokens=(32, 128),
    products_tokens=(1, 16, 128),
    part_layers=(1,),
    held_out=(Point(kind="decode", batch=4, tokens=96), Point(kind="prefill", batch=2, tokens=96)),
    train_tokens=(64, 128, 256),
    proof_hidden=(64, 256, 576),
    proof_tokens=128,
    hash_bytes=5_000_000,
)


# ---- what a sample should have cost


def predicted_s(device: Device, point: Point, model: Callable[[int], ModelSize]) -> float:
    """The device's price for a point. `model` gives the sizes of the first n layers (0: all)."""
    whole = model(0)
    if point.kind == "products":
        flop = roofline.FORWARD_FLOP_PER_WEIGHT * whole.weights_active * point.tokens
        return device.products_s(flop, roofline.weight_bytes_read(whole, point.tokens))
    if point.kind == "prefill":
        return device.roofline_s(Forward(model=without_head(whole), batch=point.batch, new_tokens=point.tokens))
    if point.kind == "decode":
        work = Forward(model=model(point.layers), batch=point.batch, new_tokens=1, past_tokens=point.tokens)
        return device.roofline_s(work)
    works: dict[str, Work] = {
        "train": Backward(model=whole, tokens=point.tokens, sequence_tokens=_sequence(point)),
        "prove": Prove(tokens=point.tokens, hidden=point.hidden),
        "verify": Verify(tokens=point.tokens, hidden=point.hidden),
        "hash": Hash(size_bytes=point.tokens),
    }
    return device.price(works[point.kind])


def without_head(model: ModelSize) -> ModelSize:
    """A prompt's pass as the engine runs it: hidden states, no logits."""
    fields = {name: getattr(model, name) for name in ModelSize.__slots__}
    return ModelSize(**{**fields, "with_head": False, "with_embedding": True})


# ---- fitting


def fit_passes(device: Device, samples: Sequence[Sample], model: Callable[[int], ModelSize]) -> Device:
    """The device with the six rates that predict the samples best: Σ log²(predicted / measured) is least."""
    start = np.array([log(getattr(device.rates, name)) for name in FITTED] + [0.5])

    def at(x: np.ndarray) -> Device:
        rates = dict(zip(FITTED, np.exp(x[:-1]).tolist(), strict=True))
        return device.with_rates(**rates, overlap=float(x[-1]))

    def residuals(x: np.ndarray) -> np.ndarray:
        trial = at(x)
        errors = [log(predicted_s(trial, sample.point, model) / sample.seconds) for sample in samples]
        return np.array(errors + (PRIOR_WEIGHT * (x - start)).tolist())

    low, high = ([value + log(bound) for value in start[:-1]] for bound in RATE_RANGE)
    best = at(least_squares(residuals, start, bounds=([*low, 0.0], [*high, 1.0])).x)
    return best.with_rates(overlap=round(best.rates.overlap, 4))


def fit_training(device: Device, samples: Sequence[Sample], model: ModelSize) -> Device:
    """Two rates from two lengths: seconds = overhead + update bytes / (bandwidth·optimizer) + flop / (peak·backward),
    where only the last grows with the tokens."""
    few, many = sorted((s for s in samples if s.point.kind == "train"), key=lambda sample: sample.point.tokens)
    works = [Backward(model=model, tokens=s.point.tokens, sequence_tokens=_sequence(s.point)) for s in (few, many)]
    flops = [roofline.training_flop(work) for work in works]
    flop_per_s = (flops[1] - flops[0]) / max(many.seconds - few.seconds, 1e-3 * many.seconds)
    update_s = few.seconds - device.rates.overhead_call_s - flops[0] / flop_per_s
    bytes_per_s = roofline.optimizer_bytes(works[0]) / max(update_s, 0.01 * few.seconds)
    return device.with_rates(
        backward=flop_per_s / device.peak_flop_per_s, optimizer=bytes_per_s / device.bandwidth_bytes_per_s
    )


def _sequence(point: Point) -> int:
    return min(TRAIN_TOKENS_PER_SEQUENCE, point.tokens)


def fit_proofs(device: Device, samples: Sequence[Sample], kind: str) -> Device:
    """Two rates from two widths: seconds = overhead + scan / (bandwidth·share) + terms / terms_per_s, where only the
    scan grows with the width."""
    narrow, wide = sorted((s for s in samples if s.point.kind == kind), key=lambda sample: sample.point.hidden)
    works = [Prove(tokens=sample.point.tokens, hidden=sample.point.hidden) for sample in (narrow, wide)]
    scans = [roofline.proof_scan_bytes(work) for work in works]
    bytes_per_s = (scans[1] - scans[0]) / max(wide.seconds - narrow.seconds, 1e-3 * wide.seconds)
    terms_s = narrow.seconds - device.rates.overhead_call_s - scans[0] / bytes_per_s
    terms_per_s = roofline.proof_terms(works[0]) / max(terms_s, 0.01 * narrow.seconds)
    share = bytes_per_s / device.bandwidth_bytes_per_s
    if kind == "prove":
        return device.with_rates(proof=share, prove_terms_per_s=terms_per_s)
    return device.with_rates(verification=share, verify_terms_per_s=terms_per_s)


def start_entry(machine: Machine, date: str) -> DeviceEntry:
    """The machine's own peaks as a catalogue entry."""
    gpu = machine.device == "cuda"

    def figure(value: float, basis: str) -> Figure:
        return Figure(value=value, source="measured", date=date, basis=basis, confidence="measured")

    peak = ComputeFigure(
        value=machine.peak_flop_per_s / 1e12,
        source="measured",
        date=date,
        basis="dense",
        accumulate="fp32",
        confidence="measured",
        note="a square bf16 product",
    )
    return DeviceEntry(
        name=machine.processor,
        kind="gpu" if gpu else "cpu",
        memory_gb=figure(machine.memory_bytes / GB, "memory of the device" if gpu else "main memory"),
        memory_bandwidth_gb_s=figure(machine.bandwidth_bytes_per_s / GB, "the better of a sum and of matrix by vector"),
        bf16_tflop_s=peak,
    )


def pass_table(phase: Phase, samples: Sequence[Sample], model: ModelSize) -> PassTable:
    """The fitted points of one phase as a grid."""
    seconds = {(s.point.batch, s.point.tokens): s.seconds for s in samples if s.point.kind == phase}
    batches = sorted({batch for batch, _ in seconds})
    tokens = sorted({length for _, length in seconds})
    return PassTable(
        phase=phase,
        model=model.name,
        layers=model.layers,
        with_head=phase == "decode",
        batch=tuple(batches),
        tokens=tuple(tokens),
        seconds=tuple(tuple(seconds[batch, length] for length in tokens) for batch in batches),
    )


def plan_points(plan: Plan) -> tuple[list[Point], list[Point]]:
    """(points to fit, points held out)."""
    fit = [Point(kind="decode", batch=b, tokens=t) for b in plan.decode_batch for t in plan.decode_tokens]
    fit += [Point(kind="prefill", batch=b, tokens=t) for b in plan.prefill_batch for t in plan.prefill_tokens]
    fit += [Point(kind="products", tokens=tokens) for tokens in plan.products_tokens]
    fit += [Point(kind="decode", tokens=plan.decode_tokens[0], layers=layers) for layers in plan.part_layers]
    held_out = list(plan.held_out)
    for kind in ("prove", "verify"):
        narrow, middle, wide = plan.proof_hidden
        fit += [Point(kind=kind, tokens=plan.proof_tokens, hidden=hidden) for hidden in (narrow, wide)]
        held_out.append(Point(kind=kind, tokens=plan.proof_tokens, hidden=middle))
    few, some, many = plan.train_tokens
    fit += [Point(kind="train", tokens=tokens) for tokens in (few, many)]
    held_out.append(Point(kind="train", tokens=some))
    fit.append(Point(kind="hash", tokens=plan.hash_bytes))
    held_out.append(Point(kind="hash", tokens=plan.hash_bytes // 2))
    return fit, held_out


def fit_all(
    machine: Machine,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    model: Callable[[int], ModelSize],
    date: str,
) -> Calibration:
    """Fit every rate to `samples`, then predict `held_out`."""
    base = start_entry(machine, date)
    device = device_from_entry(base, load_catalogue().rate_values(base)).with_rates(
        overhead_call_s=0.0, overhead_step_s=0.0
    )
    passes = [sample for sample in samples if sample.point.kind in ("prefill", "decode", "products")]
    device = fit_passes(device, passes, model)
    device = fit_training(device, samples, model(0))
    device = fit_proofs(fit_proofs(device, samples, "prove"), samples, "verify")
    hashed = next(sample for sample in samples if sample.point.kind == "hash")
    device = device.with_rates(hash_bytes_per_s=hashed.point.tokens / hashed.seconds)
    fitted = (
        *FITTED,
        "overlap",
        "backward",
        "optimizer",
        "proof",
        "verification",
        "prove_terms_per_s",
        "verify_terms_per_s",
        "hash_bytes_per_s",
        "overhead_call_s",
        "overhead_step_s",
    )
    rates = {
        name: Rate(
            value=getattr(device.rates, name), source="measured", date=date, basis="fitted", confidence="measured"
        )
        for name in fitted
    }
    whole = [sample for sample in passes if sample.point.layers == 0]
    return Calibration(
        machine=machine,
        model=model(0),
        device=device,
        entry=base.model_copy(update={"rates": rates}),
        tables=(pass_table("prefill", whole, model(0)), pass_table("decode", whole, model(0))),
        lines=tuple(
            Line(sample.point, sample.seconds, predicted_s(device, sample.point, model), held, sample.disturbance)
            for group, held in ((samples, False), (held_out, True))
            for sample in group
        ),
    )


# ---- command line


def calibrate(bench: Bench, plan: Plan, rounds: int, date: str) -> Calibration:
    """Measure, fit, predict."""
    fit, held_out = plan_points(plan)
    samples = bench.measure([*fit, *held_out], rounds=rounds, progress=_Progress())
    return fit_all(bench.machine(), samples[: len(fit)], samples[len(fit) :], bench.size, date)


class _Progress:
    """One line on a terminal, rewritten; a line every ten seconds in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s and done < total:
            return
        self._next_s = now_s + (0.5 if self._terminal else 10.0)
        begin, end = ("\r", "\n" if done == total else "") if self._terminal else ("", "\n")
        print(f"{begin}measuring: {done} of {total} points", end=end, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.hardware --calibrate", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of a checkpoint (make model)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--threads", type=int, default=None, help="torch threads; default: all cores")
    parser.add_argument("--clock", choices=("wall", "thread"), default="wall", help="thread: processor time, 1 thread")
    parser.add_argument("--rounds", type=int, default=5, help="times each point is measured; the best counts")
    parser.add_argument("--small", action="store_true", help="few small points: for a tiny model, or a quick look")
    parser.add_argument("--out", type=Path, default=THIS_MACHINE_PROFILE, help="where the profile goes")
    parser.add_argument("--report", type=Path, default=None, help="where the report goes, beside the screen")
    parser.add_argument("--error-max", type=float, default=ERROR_MAX, help="largest error of a held-out point")
    given = parser.parse_args(arguments)
    if not given.model.is_dir():
        print(
            f"--model is {given.model}: no such folder; expected a checkpoint (`make model` makes one)", file=sys.stderr
        )
        return 2
    clock: Clock = given.clock
    threads = given.threads or (1 if clock == "thread" else _cores())
    date = datetime.date.today().isoformat()
    bench = Bench(given.model, device=given.device, threads=threads, clock=clock)
    calibration = calibrate(bench, SMALL if given.small else FULL, given.rounds, date)
    text = report(calibration, date)
    print(text)
    write(given.out, dump_profile(to_profile(calibration, date)))
    print(f"profile written to {given.out}")
    if given.report is not None:
        write(given.report, text)
    worst = calibration.held_out_error_max
    print(f"largest held-out error {worst:.1%}; expected at most {given.error_max:.0%}")
    return 0 if worst <= given.error_max else 1


def to_profile(calibration: Calibration, date: str) -> Profile:
    machine = calibration.machine
    origin = Origin(
        date=date,
        engine=machine.engine,
        processor=machine.processor,
        clock=machine.clock,
        model=calibration.model.name,
        held_out_error_max=calibration.held_out_error_max,
        load_average=machine.load_average,
    )
    return Profile(origin=origin, device=calibration.entry, table=calibration.tables)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _cores() -> int:
    return len(os.sched_getaffinity(0))
