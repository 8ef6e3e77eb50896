"""Why: where a device was measured, the measurement is the price; the roofline is for everything else.

A profile is one TOML file that `python -m sim.hardware --calibrate` writes: the device's figures, its fitted rates, and
tables of measured seconds for one model. It says when, with which engine and by which clock it was measured, because a
profile of another engine is wrong by factors. A scenario names it as a device: `device = "file:runs/this-machine.toml"`
or `device = "this-machine"`.

Between measured points a table is read linearly, in the quantities themselves: the cost of a pass is close to linear in
batch and length, and interpolating its logarithm on a coarse grid overestimates by more than a tenth in mid-interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from refimpl.work import Forward, ModelSize
from sim.catalogue import CatalogueError, DeviceEntry, Strict, explain, read_toml

Phase = Literal["prefill", "decode"]


class PassTable(Strict):
    """Seconds of one pass by batch (rows) and tokens (columns): of a prompt in prefill, already cached in decode."""

    phase: Phase
    model: str
    layers: int = Field(ge=1)
    with_head: bool  # the measured pass went through the output head
    batch: tuple[int, ...] = Field(min_length=1)
    tokens: tuple[int, ...] = Field(min_length=1)
    seconds: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _shapes(self) -> PassTable:
        for axis in ("batch", "tokens"):
            values = getattr(self, axis)
            if list(values) != sorted(set(values)):
                raise ValueError(f"{axis} is {list(values)}; expected rising values")
        if [len(row) for row in self.seconds] != [len(self.tokens)] * len(self.batch):
            raise ValueError(f"seconds must have {len(self.batch)} rows of {len(self.tokens)} values")
        if any(value <= 0 for row in self.seconds for value in row):
            raise ValueError("seconds must all be above 0")
        return self

    def covers(self, work: Forward) -> bool:
        """Whether every step of `work` lies inside the measured grid, for the measured model."""
        first, last = self.span(work)
        return (
            self.phase == ("decode" if work.new_tokens == 1 and work.past_tokens > 0 else "prefill")
            and (self.phase == "decode" or (work.past_tokens == 0 and work.steps == 1))
            and self.model == work.model.name
            and self.layers == work.model.layers
            and self.batch[0] <= work.batch <= self.batch[-1]
            and self.tokens[0] <= first
            and last <= self.tokens[-1]
        )

    def span(self, work: Forward) -> tuple[int, int]:
        """Column values of the first and the last step."""
        if self.phase == "prefill":
            return work.new_tokens, work.new_tokens
        return work.past_tokens, work.past_tokens + work.steps - 1

    def seconds_of(self, work: Forward) -> float:
        """Sum over the steps, each read from the table."""
        first, last = self.span(work)
        row = self._row(work.batch)
        return float(np.interp(np.arange(first, last + 1), self.tokens, row).sum())

    def _row(self, batch: int) -> NDArray[np.float64]:
        grid = np.array(self.seconds)
        return np.array([np.interp(batch, self.batch, grid[:, column]) for column in range(len(self.tokens))])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A measured point, and what its neighbours say about it."""

    axis: Literal["batch", "tokens"]
    batch: int
    tokens: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def hold_one_out(table: PassTable) -> list[LeftOut]:
    """Leave out each inner row and each inner column in turn and read its points from the rest: an upper bound of the
    table's error between its points."""
    grid, found = np.array(table.seconds), []
    for i in range(1, len(table.batch) - 1):
        weight = (table.batch[i] - table.batch[i - 1]) / (table.batch[i + 1] - table.batch[i - 1])
        row = grid[i - 1] + weight * (grid[i + 1] - grid[i - 1])
        found += [
            LeftOut("batch", table.batch[i], tokens, float(grid[i, j]), float(row[j]))
            for j, tokens in enumerate(table.tokens)
        ]
    for j in range(1, len(table.tokens) - 1):
        weight = (table.tokens[j] - table.tokens[j - 1]) / (table.tokens[j + 1] - table.tokens[j - 1])
        column = grid[:, j - 1] + weight * (grid[:, j + 1] - grid[:, j - 1])
        found += [
            LeftOut("tokens", batch, table.tokens[j], float(grid[i, j]), float(column[i]))
            for i, batch in enumerate(table.batch)
        ]
    return found


def find_table(tables: Sequence[PassTable], work: Forward) -> PassTable | None:
    return next((table for table in tables if table.covers(work)), None)


def head_difference(table: PassTable, model: ModelSize) -> int:
    """+1: the work goes through the head and the measured pass did not; −1: the other way round; 0: alike."""
    return int(model.with_head) - int(table.with_head)


class Origin(Strict):
    """When, where and how a profile was measured."""

    date: str
    engine: str  # versions and threads: a profile of another engine is another device
    processor: str
    clock: Literal["wall", "thread"]
    model: str
    held_out_error_max: float  # of the roofline, on points that were not fitted
    load_average: float  # of the machine while measuring


class Profile(Strict):
    """The whole file."""

    origin: Origin
    device: DeviceEntry
    table: tuple[PassTable, ...] = ()


def load_profile(path: Path) -> Profile:
    """Read and check a profile. Raises CatalogueError with file, field, value and expectation."""
    raw: dict[str, Any] = read_toml(path)
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        raise CatalogueError(explain(error, Profile, raw, path.name)) from None


def dump_profile(profile: Profile) -> str:
    """The profile as TOML text."""
    origin, device = profile.origin.model_dump(), profile.device.model_dump(exclude={"rates", "rent"})
    lines = ["# Written by `python -m sim.hardware --calibrate`.", "", "[origin]"]
    lines += [f"{key} = {_toml(value)}" for key, value in origin.items()]
    lines += ["", "[device]"] + [f"{key} = {_toml(value)}" for key, value in device.items()]
    lines += ["", "[device.rates]"]
    lines += [f"{name} = {_toml(rate.model_dump())}" for name, rate in profile.device.rates.items()]
    for table in profile.table:
        lines += ["", "[[table]]"] + [f"{key} = {_toml(value)}" for key, value in table.model_dump().items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(float(f"{value:.6g}")) if isinstance(value, float) else str(value)
