"""Why: a calibration is believed when its table can be read: measured, predicted, error, and what was held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refimpl.measure import Machine, Point
from refimpl.work import Forward, ModelSize
from sim.catalogue import DeviceEntry
from sim.hardware import GB, Device
from sim.profile import PassTable, hold_one_out


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the report."""

    point: Point
    measured_s: float
    predicted_s: float
    held_out: bool
    disturbance: float  # of the measurement: how far its median lay above its best

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Calibration:
    """What came out: the fitted device, the lines of the report, and the tables."""

    machine: Machine
    model: ModelSize
    device: Device
    entry: DeviceEntry
    tables: tuple[PassTable, ...]
    lines: tuple[Line, ...]

    @property
    def held_out_error_max(self) -> float:
        return max(abs(line.error) for line in self.lines if line.held_out)


def report(calibration: Calibration, date: str) -> str:
    """The calibration as Markdown."""
    machine = calibration.machine
    lines = [
        f"# Calibration of {machine.processor}, {date}",
        "",
        f"{machine.engine}; {machine.clock} clock; load average {machine.load_average:.1f}; model "
        f"{calibration.model.name}; peaks {machine.peak_flop_per_s / 1e9:.0f} GFLOP/s bf16, "
        f"{machine.bandwidth_bytes_per_s / GB:.2f} GB/s.",
        "",
        "| rate | fitted |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {rate.value:.4g} |" for name, rate in calibration.entry.rates.items()]
    held = [line for line in calibration.lines if line.held_out]
    fitted = [line for line in calibration.lines if not line.held_out]
    for title, rows in (("Held out of the fit", held), ("Fitted", fitted)):
        lines += [
            "",
            f"## {title}",
            "",
            "| work | measured ms | predicted ms | error | median over best |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {describe(row.point)} | {row.measured_s * 1e3:.2f} | {row.predicted_s * 1e3:.2f} | {row.error:+.1%} "
            f"| {row.disturbance:+.0%} |"
            for row in rows
        ]
        errors = [abs(row.error) for row in rows]
        lines += ["", f"Largest error {max(errors):.1%}, mean {np.mean(errors):.1%}."]
    lines += ["", "## Tables, each inner row and column left out in turn and read linearly", ""]
    lines += ["| table | points | largest error | mean |", "| --- | --- | --- | --- |"]
    for table in calibration.tables:
        left_out = [abs(point.error) for point in hold_one_out(table)]
        figures = f"{max(left_out):.1%} | {np.mean(left_out):.1%}" if left_out else "– | –"
        lines.append(f"| {table.phase} | {len(left_out)} | {figures} |")
    lines += ["", "## Where a pass goes, as fitted", ""]
    lines += ["| work | products | attention | between the products | overhead |", "| --- | --- | --- | --- | --- |"]
    for batch, new_tokens, past_tokens in ((1, 1, 256), (16, 1, 1024), (1, 128, 0), (8, 512, 0)):
        work = Forward(model=calibration.model, batch=batch, new_tokens=new_tokens, past_tokens=past_tokens)
        parts = calibration.device.parts_s(work)
        shares = " | ".join(f"{seconds / sum(parts.values()):.0%}" for seconds in parts.values())
        lines.append(f"| batch {batch}, {new_tokens} new, {past_tokens} cached | {shares} |")
    return "\n".join(lines) + "\n"


def describe(point: Point) -> str:
    match point.kind:
        case "decode":
            part = f", first {point.layers} layers" if point.layers else ""
            return f"decode step, batch {point.batch}, {point.tokens} cached{part}"
        case "prefill":
            return f"prefill, batch {point.batch}, {point.tokens} tokens"
        case "products":
            return f"matrix products alone, {point.tokens} tokens"
        case "train":
            return f"training step, {point.tokens} tokens"
        case "hash":
            return f"SHA-256 of {point.tokens / 1e6:g} MB"
    return f"{point.kind}, {point.tokens} tokens of width {point.hidden}"
