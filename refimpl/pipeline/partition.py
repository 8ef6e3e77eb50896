"""Which device holds which layers: the cut that makes a ring of unequal devices fast, or the reason why there is none.

A chain of L layers is cut into contiguous stages, one per used device; every layer is held exactly once. With stage
times tau_s (one micro-batch), one-way hop times lambda_s (stage s to its successor; the last hop carries the sampled
tokens back to the first stage) and M micro-batches in flight, one token of every sequence takes the cycle

    C = max( M * max_s max(tau_s, o_s),  sum_s (tau_s + lambda_s) )

where o_s is how long the activations of one micro-batch occupy link s. Objectives, by name:

- "latency":    the second term, the time of one token through the ring (the cycle for M = 1);
- "throughput": C for the M given; without M the ring counts as saturated and the bottleneck, max_s max(tau_s, o_s),
                decides. Among cuts of equal C the one with the least latency is taken.

Exact or not: with the order of devices given (devices may be left out), always exact, by dynamic programming. With the
order free, exact by dynamic programming over how many devices of each kind are used (equal devices are one kind), as
long as that table stays within `WORK_MAX`; beyond, the best of many orders plus a local search, and the result says so.
`experiments/pipeline/partition_gap.py` measures what is lost then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from refimpl.pipeline import partition_search as search
from refimpl.pipeline.partition_dp import Cut, Tables, best_in_order, best_of_kinds, kinds_of, kinds_work
from refimpl.work import ModelSize

WORK_MAX = 150_000_000
"""Inner steps that one exact table for free order may cost (about 0.5 s of one core); beyond it: local search."""

Objective = Literal["throughput", "latency"]


class NoCut(ValueError):
    """No cut fits. Takes exactly one argument: the sentence that says what is missing and where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """What must be placed: bytes per layer (weights and the cache of the wished batch and length), and the ends."""

    layer_bytes: tuple[float, ...]
    embedding_bytes: float = 0.0  # on the first stage
    head_bytes: float = 0.0  # on the last stage
    tied: bool = False  # head and embedding are one matrix: held once where one stage has both
    stage_bytes: float = 0.0  # activations and buffers, on every stage

    def __post_init__(self) -> None:
        if not self.layer_bytes:
            raise ValueError("a chain needs at least one layer; layer_bytes is empty")
        numbers = (*self.layer_bytes, self.embedding_bytes, self.head_bytes, self.stage_bytes)
        if not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise ValueError(f"bytes of a chain are finite and not negative, got {numbers}")

    def needs_bytes(self, first: int, end: int) -> float:
        """Memory of a stage that holds layers first .. end - 1."""
        embedding = self.embedding_bytes if first == 0 else 0.0
        head = self.head_bytes if end == len(self.layer_bytes) else 0.0
        ends = max(embedding, head) if self.tied and embedding and head else embedding + head
        return sum(self.layer_bytes[first:end]) + ends + self.stage_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One place for a stage: its memory, and the time that one micro-batch takes in each layer and in the ends."""

    name: str
    memory_bytes: float
    layer_s: float | tuple[float, ...]  # one number: every layer takes the same
    embedding_s: float = 0.0
    head_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Links:
    """Directed links between devices, indexed [source, target]; infinite latency: no link that way."""

    latency_s: np.ndarray  # [devices, devices]
    transfer_s: np.ndarray | None = None  # [devices, devices]: the link is busy so long with one micro-batch


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers first .. end - 1 on one device."""

    device: str
    first: int
    end: int
    needs_bytes: float
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A whole, contiguous cut, with the figures that it was chosen by."""

    stages: tuple[Stage, ...]
    bottleneck_s: float  # max_s max(tau_s, o_s)
    latency_s: float  # sum_s (tau_s + lambda_s)
    cycle_s: float  # C for the micro-batches given (bottleneck_s when saturated, latency_s for "latency")
    exact: bool  # no better cut exists
    method: str


def chain_of(model: ModelSize, batch: int, length_tokens: int, *, tied: bool = False, pass_tokens: int = 0) -> Chain:
    """The chain of a whole decoder: weights per layer plus the cache of `batch` sequences of `length_tokens`.

    `tied`: head and embedding are one matrix. `pass_tokens`: tokens of the largest pass (rows x chunk); each stage then
    holds its input and output states and the widest inner activation of these.
    """
    ends = model.vocabulary * model.hidden * model.bytes_per_weight
    body_bytes = model.weight_bytes - ends * (model.with_embedding + model.with_head)
    layer_bytes = (body_bytes + model.kv_bytes_per_token * batch * length_tokens) / model.layers
    widest = max(model.intermediate, model.expert_intermediate * max(1, model.experts_active))
    return Chain(
        layer_bytes=(layer_bytes,) * model.layers,
        embedding_bytes=ends,
        head_bytes=ends,
        tied=tied,
        stage_bytes=pass_tokens * (2 * model.hidden + 2 * widest) * 2.0,
    )


def uniform_links(devices: int, hop_s: float = 0.0, transfer_s: float = 0.0) -> Links:
    """Every pair of devices linked alike."""
    return Links(latency_s=np.full((devices, devices), hop_s), transfer_s=np.full((devices, devices), transfer_s))


def partition(
    chain: Chain,
    devices: Sequence[Device],
    links: Links,
    *,
    objective: Objective,
    micro_batches: int | None = None,
    order: Literal["given", "free"] = "free",
    seed: int = 0,
    work_max: int = WORK_MAX,
) -> Partition:
    """The best cut of `chain` over some of `devices`.

    `order="given"`: stages follow the order of `devices` (some may be left out); "free": any order. `seed` starts the
    local search, where one is needed. Raises `NoCut` with the reason when nothing fits.
    """
    tables = _tables(chain, devices, links)
    if objective not in ("throughput", "latency"):
        raise ValueError(f"objective is 'throughput' or 'latency', got {objective!r}")
    if micro_batches is not None and micro_batches < 1:
        raise ValueError(f"micro_batches is at least 1, got {micro_batches}")
    weight = 1.0 if objective == "latency" else (math.inf if micro_batches is None else float(micro_batches))

    solve, exact, method = _method(tables, order, weight, work_max, seed)
    cut = solve(tables)
    if cut is None:
        raise NoCut(_why_not(chain, devices, tables, order, lambda: solve(tables.without_links()) is not None))
    return _result(chain, devices, tables, cut, weight, exact, method)


def _method(
    tables: Tables, order: str, weight: float, work_max: int, seed: int
) -> tuple[Callable[[Tables], Cut | None], bool, str]:
    """(solver, is it exact, its name) for this problem."""
    if order == "given":
        return lambda t: search.best_cycle(t, weight, best_in_order), True, "dynamic programming, order given"
    kinds = kinds_of(tables)
    if kinds_work(tables, kinds) <= work_max:
        name = f"dynamic programming over {len(kinds)} kinds of device"
        return lambda t: search.best_cycle(t, weight, lambda problem: best_of_kinds(problem, kinds)), True, name
    return lambda t: search.best_of_orders(t, weight, np.random.default_rng(seed)), False, "local search over orders"


def _tables(chain: Chain, devices: Sequence[Device], links: Links) -> Tables:
    layers, count = len(chain.layer_bytes), len(devices)
    if count == 0:
        raise ValueError("at least one device is needed, got none")
    if len({device.name for device in devices}) != count:
        raise ValueError(f"device names must differ, got {[device.name for device in devices]}")
    time_s = np.empty((count, layers))
    for d, device in enumerate(devices):
        row = device.layer_s if isinstance(device.layer_s, tuple) else (device.layer_s,) * layers
        if len(row) != layers:
            raise ValueError(f"device {device.name!r} has {len(row)} layer times, the chain has {layers} layers")
        time_s[d] = row
    ends_s = np.array([[device.embedding_s, device.head_s] for device in devices], dtype=float)
    if not (np.isfinite(time_s).all() and (time_s >= 0).all() and np.isfinite(ends_s).all() and (ends_s >= 0).all()):
        raise ValueError("stage times are finite and not negative")
    latency_s = np.asarray(links.latency_s, dtype=float)
    transfer_s = np.zeros((count, count)) if links.transfer_s is None else np.asarray(links.transfer_s, dtype=float)
    for field, matrix in (("latency_s", latency_s), ("transfer_s", transfer_s)):
        if matrix.shape != (count, count) or np.isnan(matrix).any() or (matrix < 0).any():
            raise ValueError(f"links.{field} must be [{count}, {count}] and not negative, has shape {matrix.shape}")
    ends_bytes = chain.embedding_bytes + chain.head_bytes
    shared = min(chain.embedding_bytes, chain.head_bytes) if chain.tied else 0.0
    return Tables(
        time_prefix_s=np.concatenate([np.zeros((count, 1)), np.cumsum(time_s, axis=1)], axis=1),
        bytes_prefix=np.concatenate([[0.0], np.cumsum(np.asarray(chain.layer_bytes, dtype=float))]),
        ends_s=ends_s,
        ends_bytes=np.array([chain.embedding_bytes, chain.head_bytes, ends_bytes - shared]),
        room_bytes=np.array([device.memory_bytes for device in devices], dtype=float) - chain.stage_bytes,
        latency_s=latency_s,
        transfer_s=transfer_s,
    )


def _result(
    chain: Chain,
    devices: Sequence[Device],
    tables: Tables,
    cut: Cut,
    weight: float,
    exact: bool,
    method: str,
) -> Partition:
    stages = tuple(
        Stage(devices[d].name, first, end, chain.needs_bytes(first, end), tables.stage_s(d, first, end))
        for d, first, end in cut
    )
    bottleneck_s, latency_s = tables.figures(cut)
    assert stages[0].first == 0 and stages[-1].end == len(chain.layer_bytes)
    assert all(a.end == b.first for a, b in pairwise(stages)), "a cut is contiguous and whole"
    return Partition(
        stages=stages,
        bottleneck_s=bottleneck_s,
        latency_s=latency_s,
        cycle_s=search.cycle_s(tables, cut, weight),
        exact=exact,
        method=method,
    )


def _why_not(
    chain: Chain, devices: Sequence[Device], tables: Tables, order: str, fits_without_links: Callable[[], bool]
) -> str:
    """The sentence: which layers, which device, how many bytes short; or which link is missing."""
    layers = len(chain.layer_bytes)
    largest = max(devices, key=lambda device: device.memory_bytes)
    for layer in range(layers):
        alone = chain.needs_bytes(layer, layer + 1)
        if alone > largest.memory_bytes:
            ends = " with the embedding" * (layer == 0 and chain.embedding_bytes > 0)
            ends += " with the head" * (layer == layers - 1 and chain.head_bytes > 0)
            return (
                f"layer {layer}{ends} needs {alone:.0f} bytes (weights and cache), the largest device "
                f"{largest.name!r} has {largest.memory_bytes:.0f}: {alone - largest.memory_bytes:.0f} bytes short"
            )
    filled = search.reach(tables, free=order == "free")
    end = filled[-1][2] if filled else 0
    if end == layers or fits_without_links():
        return _missing_link(devices, tables)
    total, room = chain.needs_bytes(0, layers), sum(device.memory_bytes for device in devices)
    if not filled:
        short = chain.needs_bytes(0, 1) - largest.memory_bytes
        return (
            f"no cut fits: layer 0 with the embedding fits on no device ({short:.0f} bytes short on {largest.name!r})"
        )
    chosen = [d for d, _, _ in filled]
    last = devices[chosen[-1]]
    short = chain.needs_bytes(filled[-1][1], end + 1) - last.memory_bytes
    idle = [f"{device.name!r} ({device.memory_bytes:.0f} bytes)" for d, device in enumerate(devices) if d not in chosen]
    return (
        f"no cut fits: layers 0..{end - 1} fit on {', '.join(repr(devices[d].name) for d in chosen)}; layers "
        f"{end}..{layers - 1} ({chain.needs_bytes(end, layers):.0f} bytes, cache included) have no place: "
        f"layer {end} is {short:.0f} bytes too much for {last.name!r}, and no device is left that holds it"
        + (f" (not used: {', '.join(idle[:3])}{' and more' * (len(idle) > 3)})" if idle else "")
        + f"; {total:.0f} bytes are needed in all, the devices have {room:.0f}"
    )


def _missing_link(devices: Sequence[Device], tables: Tables) -> str:
    open_ways = np.isfinite(tables.latency_s + tables.transfer_s)
    one_way = [
        f"{devices[a].name!r} reaches {devices[b].name!r} but not back"
        for a in range(len(devices))
        for b in range(len(devices))
        if a != b and open_ways[a, b] and not open_ways[b, a]
    ]
    cut_off = [
        repr(device.name)
        for d, device in enumerate(devices)
        if len(devices) > 1 and not (np.delete(open_ways[d], d).any() and np.delete(open_ways[:, d], d).any())
    ]
    seen = one_way[:3] + ([f"without a way in or out: {', '.join(cut_off[:3])}"] if cut_off else [])
    return (
        "the devices have memory enough, but no ring over their links holds the chain (every stage must reach the "
        f"next, and the last the first): {'; '.join(seen) if seen else 'the linked groups are each too small'}"
    )
