"""Why: a device's figures are facts with a source, or they are gossip; this file reads them and refuses the rest.

`devices.toml` holds every figure with value, source, date, basis and confidence. Catalogues elsewhere mix dense with
sparse, FP16 with FP32 accumulation, tensor with non-tensor and one card's memory with another's, by factors of two to
four; here the basis is a field, and a sparse figure does not load.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.refusals import explain

CATALOGUE_PATH = Path(__file__).with_name("devices.toml")

Confidence = Literal["high", "medium", "low", "unverified", "measured", "assumption"]


class CatalogueError(ValueError):
    """A file of figures that does not hold together. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class UnknownDevice(ValueError):
    """A device name that no catalogue entry bears. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Strict(BaseModel):
    """Unknown fields are refused, values are not coerced from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Figure(Strict):
    """One number, with what is needed to trust it or not."""

    value: float = Field(gt=0, allow_inf_nan=False)
    source: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}(-\d{2}){0,2}$")
    basis: str = Field(min_length=1)
    confidence: Confidence
    note: str = ""

    @property
    def source_keys(self) -> list[str]:
        return [key.strip() for key in self.source.split("+")]


class Rate(Figure):
    """A figure that may be zero (an overhead that was not found)."""

    value: float = Field(ge=0, allow_inf_nan=False)


class ComputeFigure(Figure):
    """Peak arithmetic: always dense, and naming the accumulator."""

    basis: Literal["dense"]
    accumulate: Literal["fp32", "fp16", "unknown"]


class Rent(Strict):
    """What an hour costs at one provider, a range: prices differ by more than tenfold between clouds."""

    provider: str
    terms: str
    usd_per_hour_low: float = Field(gt=0)
    usd_per_hour_high: float = Field(gt=0)
    date: str = Field(pattern=r"^\d{4}(-\d{2}){0,2}$")
    source: str

    @model_validator(mode="after")
    def _in_order(self) -> Rent:
        if self.usd_per_hour_high < self.usd_per_hour_low:
            raise ValueError("usd_per_hour_high must not be below usd_per_hour_low")
        return self


class RateTable(Strict):
    """What a calibration fits, and what is assumed until it has."""

    prefill: Rate
    decode: Rate
    overlap: Rate
    attention: Rate
    activation: Rate
    backward: Rate
    optimizer: Rate
    proof: Rate
    verification: Rate
    prove_terms_per_s: Rate
    verify_terms_per_s: Rate
    hash_bytes_per_s: Rate
    host_cores: Rate
    core_efficiency: Rate
    overhead_call_s: Rate
    overhead_step_s: Rate
    overhead_layer_s: Rate
    memory_fraction: Rate
    parallel_efficiency: Rate

    @model_validator(mode="after")
    def _rates_are_positive(self) -> RateTable:
        for name in type(self).model_fields:
            value = getattr(self, name).value
            if not name.startswith("over") and value <= 0:
                raise ValueError(f"{name} is {value}; expected above 0")
            if name in ("overlap", "memory_fraction", "parallel_efficiency", "core_efficiency") and value > 1:
                raise ValueError(f"{name} is {value}; expected at most 1")
        return self


class DeviceEntry(Strict):
    """One device as the catalogue or a measured profile gives it."""

    name: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    kind: Literal["gpu", "cpu"]
    memory_gb: Figure
    memory_bandwidth_gb_s: Figure
    bf16_tflop_s: ComputeFigure
    rates: dict[str, Rate] = {}  # instead of those of its kind
    rent: tuple[Rent, ...] = ()

    @model_validator(mode="after")
    def _known_rates(self) -> DeviceEntry:
        unknown = sorted(set(self.rates) - set(RateTable.model_fields))
        if unknown:
            raise ValueError(f"rates {unknown} are not known; expected some of {sorted(RateTable.model_fields)}")
        return self


class Catalogue(Strict):
    """The whole file."""

    sources: dict[str, str]
    rates: dict[Literal["gpu", "cpu"], RateTable]
    device: tuple[DeviceEntry, ...]

    @model_validator(mode="after")
    def _whole(self) -> Catalogue:
        missing_kinds = {entry.kind for entry in self.device} - set(self.rates)
        if missing_kinds:
            raise ValueError(f"no [rates.KIND] for {sorted(missing_kinds)}")
        seen: dict[str, str] = {}
        for entry in self.device:
            for label in (entry.name, *entry.aliases):
                key = _plain(label)
                if key in seen:
                    raise ValueError(f"{label!r} names both {seen[key]!r} and {entry.name!r}; names must be unique")
                seen[key] = entry.name
            for field, figure in _figures(entry):
                for source in figure.source_keys:
                    if source not in self.sources:
                        raise ValueError(f"{entry.name}, {field}: source {source!r} is not listed under [sources]")
        return self

    def find(self, name: str) -> DeviceEntry:
        """The entry of that name or alias; case, blanks, dashes and underscores do not matter.

        Raises UnknownDevice with the nearest names and all known ones.
        """
        key = _plain(name)
        for entry in self.device:
            if key in (_plain(label) for label in (entry.name, *entry.aliases)):
                return entry
        raise UnknownDevice(_unknown_sentence(name, self.device))

    def rate_values(self, entry: DeviceEntry) -> dict[str, float]:
        """The entry's own rates where it has them, else those of its kind."""
        table = self.rates[entry.kind]
        return {field: entry.rates.get(field, getattr(table, field)).value for field in RateTable.model_fields}


def _figures(entry: DeviceEntry) -> list[tuple[str, Figure]]:
    named = [(field, getattr(entry, field)) for field in ("memory_gb", "memory_bandwidth_gb_s", "bf16_tflop_s")]
    return named + [(f"rates.{name}", rate) for name, rate in entry.rates.items()]


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _unknown_sentence(name: str, entries: Sequence[DeviceEntry]) -> str:
    labels = {_plain(label): entry.name for entry in entries for label in (entry.name, *entry.aliases)}
    near = difflib.get_close_matches(_plain(name), labels, n=3, cutoff=0.5)
    guesses = list(dict.fromkeys(labels[key] for key in near))
    hint = f" Did you mean {' or '.join(repr(guess) for guess in guesses)}?" if guesses else ""
    return f"device {name!r} is not in the catalogue.{hint} Known: {', '.join(entry.name for entry in entries)}."


def check(model: type[Catalogue], raw: Mapping[str, Any], file: str) -> Catalogue:
    """Validate, or raise CatalogueError with one line for each wrong field: file, field, value, expectation."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise CatalogueError(explain(error, model, raw, file)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file; CatalogueError names the file when it is missing or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CatalogueError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{path}: not valid TOML: {error}") from None


@lru_cache(maxsize=8)
def load_catalogue(path: Path = CATALOGUE_PATH) -> Catalogue:
    return check(Catalogue, read_toml(path), path.name)
