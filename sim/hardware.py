"""Why: virtual time is only worth what its prices are worth. This file turns work into seconds on a named device.

A pass over a model is priced as a roofline, part by part (the parts follow one another on the device):

    matrix products   2·P·tokens / (peak·prefill)           with   weight bytes / (bandwidth·decode)
    attention         attention FLOP / (peak·attention)     with   KV bytes / (bandwidth·attention)
    between them      activation bytes / (bandwidth·activation)
    overhead          once a call, once a step, once a layer of a step

"a with b" is overlap·max(a, b) + (1 − overlap)·(a + b): a GPU hides its reading behind its arithmetic (1, the textbook
roofline), one core of a processor hides nothing (0). The rates (`prefill`, `decode`, ...) are fitted shares of the peak
figures; `python -m sim.hardware --calibrate` fits them for this machine. A measured profile replaces the roofline where
it has measurements. Memory is a hard limit: work that does not fit raises `OutOfMemory`, it is never priced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from refimpl.work import Backward, Forward, Hash, ModelSize, Prove, Seconds, Several, Spread, Verify, Work
from sim import roofline
from sim.catalogue import CATALOGUE_PATH, CatalogueError, DeviceEntry, Rent, load_catalogue
from sim.profile import PassTable, find_table, head_difference, load_profile

GB = 1e9  # everywhere; what is binary is called GiB

THIS_MACHINE = "this-machine"
THIS_MACHINE_PROFILE = Path("runs/this-machine.toml")  # from where the command is run

PRICES_KEPT = 200_000  # works whose price a device remembers


class OutOfMemory(Exception):
    """Work that does not fit its device. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """How far a device reaches its peaks, and what it pays beside: the fitted part of the model."""

    prefill: float  # share of peak FLOP/s in matrix products
    decode: float  # share of bandwidth when reading weights
    overlap: float  # 1: reading hides behind arithmetic, 0: they add up
    attention: float  # share of peak FLOP/s and of bandwidth in attention
    activation: float  # share of bandwidth between the products
    backward: float  # share of peak FLOP/s in training
    optimizer: float  # share of bandwidth in AdamW's update
    proof: float  # share of bandwidth when looking for the largest activations
    verification: float  # the same, when checking
    prove_terms_per_s: float  # field operations interpolating
    verify_terms_per_s: float  # field operations evaluating
    hash_bytes_per_s: float  # one core
    host_cores: float  # that this device's node has for work of its own
    core_efficiency: float  # of several cores together against as many alone
    overhead_call_s: float
    overhead_step_s: float
    overhead_layer_s: float
    memory_fraction: float  # share of the memory that may be filled
    parallel_efficiency: float  # of N together against N alone


class Device:
    """One device (or N as one) with its figures; `price(work)` says how long it takes. Shared between nodes."""

    def __init__(
        self,
        *,
        name: str,
        kind: str,
        memory_bytes: float,
        bandwidth_bytes_per_s: float,
        peak_flop_per_s: float,
        rates: Rates,
        count: int = 1,
        rent: tuple[Rent, ...] = (),
        tables: tuple[PassTable, ...] = (),
    ) -> None:
        assert memory_bytes > 0 and bandwidth_bytes_per_s > 0 and peak_flop_per_s > 0 and count >= 1
        self.name = name
        self.kind = kind
        self.count = count
        self.memory_bytes = memory_bytes
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.peak_flop_per_s = peak_flop_per_s
        self.rates = rates
        self.rent = rent
        self.tables = tables
        self._prices: dict[Work, float] = {}

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    def price(self, work: Work) -> float:
        """Seconds that `work` takes here. Raises OutOfMemory when it does not fit, ValueError for impossible sizes."""
        seconds = self._prices.get(work)
        if seconds is None:
            seconds = self._price(work)
            if len(self._prices) >= PRICES_KEPT:
                self._prices.clear()
            self._prices[work] = seconds
        return seconds

    def _price(self, work: Work) -> float:
        match work:
            case Forward():
                return self._price_forward(work)
            case Backward():
                return self._price_backward(work)
            case Prove():
                return self._price_proof(work, self.rates.proof, self.rates.prove_terms_per_s)
            case Verify():
                return self._price_proof(work, self.rates.verification, self.rates.verify_terms_per_s)
            case Hash():
                _require(work.size_bytes >= 0, work, "size_bytes of at least 0")
                return self.rates.overhead_call_s + work.size_bytes / self.rates.hash_bytes_per_s
            case Spread():
                _require(work.pieces >= 0, work, "pieces of at least 0")
                rounds = -(-work.pieces // self.cores)  # nobody helps with the last piece
                return rounds * self.price(work.piece) / (self.rates.core_efficiency if work.pieces > 1 else 1.0)
            case Seconds():
                _require(work.duration_s >= 0, work, "duration_s of at least 0")
                return work.duration_s
            case Several():
                return sum(self.price(part) for part in work.parts)
        raise TypeError(f"{work!r} is no work; expected one of {Work}")

    @property
    def cores(self) -> int:
        """Of the host."""
        return max(1, int(self.rates.host_cores))

    def _price_forward(self, work: Forward) -> float:
        _require(work.batch >= 1 and work.new_tokens >= 1, work, "batch and new_tokens of at least 1")
        _require(work.past_tokens >= 0 and work.steps >= 1, work, "past_tokens of at least 0, steps of at least 1")
        end = work.past_tokens + work.steps * work.new_tokens
        self.require_memory(
            roofline.forward_memory(work.model, work.batch, end, work.new_tokens),
            f"{work.batch} sequence(s) of {end} tokens through {work.model.name}",
        )
        return self.rates.overhead_call_s + self.passes_s(work)

    def passes_s(self, work: Forward) -> float:
        """All steps, without the overhead of the call: measured where a table covers them, else by the roofline."""
        table = find_table(self.tables, work) if self.tables else None
        if table is None:
            return self.roofline_s(work)
        head_s = self.products_s(
            roofline.FORWARD_FLOP_PER_WEIGHT * work.model.vocabulary * work.model.hidden * work.batch * work.new_tokens,
            work.model.vocabulary * work.model.hidden * work.model.bytes_per_weight,
        )
        return table.seconds_of(work) + head_difference(table, work.model) * work.steps * head_s

    def products_s(self, flop: float, weight_bytes: float) -> float:
        """Matrix products over weights that are read once."""
        arithmetic_s = flop / (self.peak_flop_per_s * self.rates.prefill)
        reading_s = weight_bytes / (self.bandwidth_bytes_per_s * self.rates.decode)
        overlap = self.rates.overlap
        return overlap * max(arithmetic_s, reading_s) + (1 - overlap) * (arithmetic_s + reading_s)

    def attention_s(self, cost: roofline.PassCost) -> float:
        """Attention of all steps: both terms grow from step to step."""
        flop_per_s = self.peak_flop_per_s * self.rates.attention
        bytes_per_s = self.bandwidth_bytes_per_s * self.rates.attention
        a_s, a_growth_s = cost.attention_flop / flop_per_s, cost.attention_flop_growth / flop_per_s
        b_s, b_growth_s = cost.kv_bytes / bytes_per_s, cost.kv_bytes_growth / bytes_per_s
        larger_s = roofline.sum_of_larger(a_s, a_growth_s, b_s, b_growth_s, cost.steps)
        both_s = roofline.sum_of_line(a_s + b_s, a_growth_s + b_growth_s, 0, cost.steps)
        return self.rates.overlap * larger_s + (1 - self.rates.overlap) * both_s

    def roofline_s(self, work: Forward) -> float:
        """All steps, part by part."""
        return sum(self.parts_s(work).values())

    def parts_s(self, work: Forward) -> dict[str, float]:
        """Where the time of all steps goes: products, attention, what lies between the products, overhead."""
        cost, rates = roofline.forward_cost(work), self.rates
        between_s = cost.activation_bytes / (self.bandwidth_bytes_per_s * rates.activation)
        return {
            "products": cost.steps * self.products_s(cost.matmul_flop, cost.weight_bytes),
            "attention": self.attention_s(cost),
            "between": cost.steps * between_s,
            "overhead": cost.steps * (rates.overhead_step_s + rates.overhead_layer_s * work.model.layers),
        }

    def _price_backward(self, work: Backward) -> float:
        _require(work.tokens >= 1 and work.sequence_tokens >= 1, work, "tokens and sequence_tokens of at least 1")
        _require(work.optimizer_steps >= 0, work, "optimizer_steps of at least 0")
        self.require_memory(roofline.backward_memory(work), f"training {work.model.name} on {work.tokens} tokens")
        passes_s = roofline.training_flop(work) / (self.peak_flop_per_s * self.rates.backward)
        update_s = roofline.optimizer_bytes(work) / (self.bandwidth_bytes_per_s * self.rates.optimizer)
        return self.rates.overhead_call_s + passes_s + update_s

    def _price_proof(self, work: Prove | Verify, share: float, terms_per_s: float) -> float:
        _require(work.tokens >= 0 and work.chunk_tokens >= 1, work, "tokens of at least 0, chunk_tokens of at least 1")
        scan_s = roofline.proof_scan_bytes(work) / (self.bandwidth_bytes_per_s * share)
        return self.rates.overhead_call_s + scan_s + roofline.proof_terms(work) / terms_per_s

    # ---- memory

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes * self.rates.memory_fraction

    def require_memory(self, need: roofline.MemoryNeed, what: str) -> None:
        """Raise OutOfMemory, saying what was asked and what the device has, unless `need` fits."""
        if need.total <= self.usable_bytes:
            return
        parts = {
            "weights": need.weights,
            "KV cache": need.kv_cache,
            "optimizer": need.optimizer,
            "activations": need.activations,
        }
        listed = ", ".join(f"{label} {size / GB:.2f}" for label, size in parts.items() if size)
        raise OutOfMemory(
            f"{what} needs {need.total / GB:.2f} GB ({listed}); {self.name} has {self.memory_bytes / GB:.2f} GB, of "
            f"which {self.rates.memory_fraction:.0%} may be filled: {self.usable_bytes / GB:.2f} GB"
        )

    def fits(self, model: ModelSize, batch: int, tokens: int) -> bool:
        """Whether the model and the cache of `batch` sequences of `tokens` tokens fit together."""
        return roofline.forward_memory(model, batch, tokens).total <= self.usable_bytes

    def batch_max(self, model: ModelSize, tokens: int) -> int:
        """The most sequences of `tokens` tokens each that fit beside the weights; 0: not even the weights do."""
        empty = roofline.forward_memory(model, 0, tokens).total
        each = roofline.forward_memory(model, 1, tokens).total - empty
        return max(0, int((self.usable_bytes - empty) // each))

    # ---- variants

    def times(self, count: int) -> Device:
        """`count` of these as one: memory adds up, speed by `parallel_efficiency`; each brings its cores, of which one
        is as fast as ever; tables of a single one no longer hold."""
        if count < 1:
            raise ValueError(f"count is {count}; expected at least 1 device")
        if count == 1:
            return self
        speed = count * self.rates.parallel_efficiency
        return Device(
            name=f"{count}x {self.name}",
            kind=self.kind,
            memory_bytes=count * self.memory_bytes,
            bandwidth_bytes_per_s=speed * self.bandwidth_bytes_per_s,
            peak_flop_per_s=speed * self.peak_flop_per_s,
            rates=replace(self.rates, host_cores=count * self.rates.host_cores),
            count=count * self.count,
            rent=self.rent,
        )

    def with_rates(self, **rates: float) -> Device:
        """The same device with some rates replaced (a calibration, a scenario's override), and without tables."""
        return Device(
            name=self.name,
            kind=self.kind,
            memory_bytes=self.memory_bytes,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            peak_flop_per_s=self.peak_flop_per_s,
            rates=replace(self.rates, **rates),
            count=self.count,
            rent=self.rent,
        )


def _require(holds: bool, work: Work, expectation: str) -> None:
    if not holds:
        raise ValueError(f"{work!r} cannot be priced; expected {expectation}")


def device_from_entry(entry: DeviceEntry, rates: Mapping[str, float], tables: tuple[PassTable, ...] = ()) -> Device:
    return Device(
        name=entry.name,
        kind=entry.kind,
        memory_bytes=entry.memory_gb.value * GB,
        bandwidth_bytes_per_s=entry.memory_bandwidth_gb_s.value * GB,
        peak_flop_per_s=entry.bf16_tflop_s.value * 1e12,
        rates=Rates(**rates),
        rent=entry.rent,
        tables=tables,
    )


def find_device(name: str, catalogue: Path = CATALOGUE_PATH) -> Device:
    """The device a scenario names: "RTX 4090", an alias in any spelling, several as one ("8x H100 SXM"), a measured
    profile ("file:PATH"), or "this-machine", the profile that `--calibrate` writes.

    Equal names give the one shared object, as long as the file stays. Raises UnknownDevice listing the nearest and
    all known names, CatalogueError for a profile that is missing or wrong.
    """
    several = re.fullmatch(r"\s*(\d+)\s*[x×]\s*(.+?)\s*", name)
    if several:
        return _several(find_device(several[2], catalogue), int(several[1]))
    if name.startswith("file:") or name == THIS_MACHINE:
        path = THIS_MACHINE_PROFILE if name == THIS_MACHINE else Path(name.removeprefix("file:"))
        if not path.is_file():
            hint = "; `python -m sim.hardware --calibrate` measures this machine and writes one"
            raise CatalogueError(f"device {name!r}: there is no profile {path}{hint}")
        return _measured(path.resolve(), path.stat().st_mtime_ns, catalogue)
    return _listed(name, catalogue)


@lru_cache(maxsize=1024)
def _several(device: Device, count: int) -> Device:
    return device.times(count)


@lru_cache(maxsize=1024)
def _listed(name: str, catalogue: Path) -> Device:
    figures = load_catalogue(catalogue)
    entry = figures.find(name)
    return device_from_entry(entry, figures.rate_values(entry))


@lru_cache(maxsize=64)
def _measured(path: Path, changed_ns: int, catalogue: Path) -> Device:
    profile = load_profile(path)
    return device_from_entry(profile.device, load_catalogue(catalogue).rate_values(profile.device), profile.table)


def known_devices(catalogue: Path = CATALOGUE_PATH) -> list[str]:
    return [entry.name for entry in load_catalogue(catalogue).device]


def print_catalogue() -> None:
    print(f"{'device':32} {'GB':>6} {'GB/s':>6} {'TFLOP/s':>8}  least trusted figure")
    order = ["high", "measured", "medium", "low", "unverified", "assumption"]
    for entry in load_catalogue().device:
        figures = (entry.memory_gb, entry.memory_bandwidth_gb_s, entry.bf16_tflop_s)
        worst = max(figures, key=lambda figure: order.index(figure.confidence))
        values = f"{figures[0].value:6g} {figures[1].value:6g} {figures[2].value:8g}"
        print(f"{entry.name:32} {values}  {worst.confidence}: {worst.source}")


def main(arguments: list[str]) -> int:
    """Without arguments, print the catalogue; `--calibrate [...]` measures this machine (sim/calibrate.py)."""
    if not arguments:
        print_catalogue()
        return 0
    if arguments[0] != "--calibrate":
        print(f"argument {arguments[0]!r} is not known; expected nothing, or --calibrate", file=sys.stderr)
        return 2
    calibrate = import_module("sim.calibrate")  # brings torch, which the simulator itself never needs
    return int(calibrate.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
