"""The noise atlas: how far honest provers are from an honest verifier, over what makes floating point differ.

Phase (decoding or one prefill) × dtype × attention kernel × batch shape × tensor-parallel sums, against the verifier:
bf16, fused attention, one prefill of a whole batch. Decoding is `attacks.honest`, answers of its own. In a prefill the
prover reads the honest answers once; what it would have drawn at each place, by the same seed, is held against the
verifier's logits: the noise of the sampling proof without a single token generated.

Shapes: n tokens of one answer, N of all, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from refimpl.arena.bench import Bench, Sent
from refimpl.arena.stats import FALSE_POSITIVE_BUDGET
from refimpl.arena.verifiers import PROJECTIONS, UNBOUNDED, VERIFIERS, mean_margin, total_distance
from refimpl.attacks.honest import HONEST
from refimpl.engine import Replay
from refimpl.model.attention import KERNELS
from refimpl.model.sampler import sample
from refimpl.model.transformer import Decoder, Layer, Step, linear, rms_norm
from refimpl.toploc.check import ChunkScore, verify_proofs
from refimpl.toploc.projection import decode, project, relative_distances
from refimpl.toploc.sampling_proof import clipped, margins


@dataclass(frozen=True, kw_only=True)
class Noise:
    """One kind of honest prover. Each statistic is (median, 99 % quantile, largest) over chunks or answers."""

    prover: str
    answers: int
    mismatches: tuple[float, float, float]  # exponent mismatches of 128, by the chunk, published scoring
    mantissa: tuple[float, float, float]  # mantissa mean, by the chunk
    sequence: tuple[float, float, float]  # toploc-sequence
    projection: tuple[float, float, float]
    margin: tuple[float, float, float]  # sampling-proof
    match_rate: float  # tokens that are exactly the verifier's


class _Sharded(torch.nn.Module):
    """A layer cut over several devices: each has some heads and some of the inner width; their outputs are summed, each
    rounded to the dtype first, as an all-reduce does. For passes without a cache."""

    def __init__(self, layer: Layer, shards: int) -> None:
        super().__init__()
        self.whole = layer
        self.parts = torch.nn.ModuleList(_shard(layer, at, shards) for at in range(shards))

    def forward(self, hidden_BTD: torch.Tensor, step: Step, index: int) -> torch.Tensor:
        layers = [part for part in self.parts if isinstance(part, Layer)]
        hidden_BTD = hidden_BTD + _summed([layer._attention(hidden_BTD, step, index) for layer in layers])
        x_BTD = rms_norm(hidden_BTD, self.whole.mlp_norm, self.whole.config.norm_eps)
        outs = []
        for layer in layers:
            gate, up = linear(x_BTD, layer.gate_up, None).chunk(2, dim=-1)
            outs.append(linear(F.silu(gate) * up, layer.down, None))
        return hidden_BTD + _summed(outs)


def _summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _shard(layer: Layer, at: int, shards: int) -> Layer:
    """Part `at` of a layer's heads and inner width."""
    c = layer.config
    config = dataclasses.replace(
        c,
        query_heads=c.query_heads // shards,
        kv_heads=c.kv_heads // shards,
        intermediate=c.intermediate // shards,
        head_dim=c.head_dim,
    )
    part = Layer(config, layer.qkv.dtype, layer.qkv.device)
    heads = layer.qkv.view(-1, c.head_dim, c.hidden)
    q, k, v = heads.split([c.query_heads, c.kv_heads, c.kv_heads])
    gate, up = layer.gate_up.chunk(2)
    with torch.no_grad():
        part.attention_norm.copy_(layer.attention_norm)
        part.qkv.copy_(torch.cat([x.chunk(shards)[at] for x in (q, k, v)]).flatten(0, 1))
        part.output.copy_(layer.output.chunk(shards, dim=1)[at])
        part.gate_up.copy_(torch.cat([gate.chunk(shards)[at], up.chunk(shards)[at]]))
        part.down.copy_(layer.down.chunk(shards, dim=1)[at])
    return part.requires_grad_(False)


def tensor_parallel(decoder: Decoder, shards: int) -> Decoder:
    """`decoder` cut over `shards` devices, all on this one. Raises ValueError when heads do not divide."""
    c = decoder.config
    if c.query_heads % shards or c.kv_heads % shards or c.intermediate % shards or c.qkv_bias or c.mlp_bias:
        raise ValueError(f"{c.query_heads} query and {c.kv_heads} key heads, without biases: not over {shards} devices")
    twin = decoder.with_attention(decoder.attention)
    twin._modules = dict(decoder._modules)
    layers = [layer for layer in decoder.layers if isinstance(layer, Layer)]
    twin.layers = torch.nn.ModuleList(_Sharded(layer, shards) for layer in layers)
    return twin


def atlas(bench: Bench, count: int, known: Mapping[str, Noise] | None = None) -> Iterator[Noise]:
    """A line for each kind of honest prover. `count` answers each. `known`: lines that were measured already, by name;
    they are not measured again."""
    for name, measure in _kinds(bench, count):
        yield measure() if known is None or name not in known else known[name]


def _kinds(bench: Bench, count: int) -> Iterator[tuple[str, Callable[[], Noise]]]:
    """What every line is called, and how it is measured."""
    for behaviour in HONEST:
        if bench.made(behaviour, count) or behaviour != "honest-batch1" or bench.setting.name == "tiny":
            name = f"decode, {behaviour}"
            yield name, partial(_decoded, bench, name, behaviour, count)
    shop = bench.shop
    right: list[Replay] = []

    def prefilled(name: str, decoder: Callable[[], Decoder], together: bool) -> Noise:
        honest = [sent for batch in bench.batches("honest", count) for sent in batch.sent]
        if not right:
            right.extend(_read(bench, shop.decoder(), honest, together=True))
        return _prefilled(bench, name, decoder(), honest, right, together)

    for dtype in ("bfloat16", "float32"):
        for kernel in KERNELS:
            for together in (True, False):
                name = f"prefill, {dtype}, {kernel}, {'a batch' if together else 'one at a time'}"
                yield name, partial(prefilled, name, partial(shop.decoder, dtype, kernel), together)
    heads = shop.decoder().config.kv_heads
    if heads > 1:
        name = f"prefill, bfloat16, {heads} devices"
        yield name, partial(prefilled, name, lambda: tensor_parallel(shop.decoder(), heads), True)


def _decoded(bench: Bench, name: str, behaviour: str, count: int) -> Noise:
    pairs = list(bench.cases(behaviour, count))
    drawn = [torch.from_numpy(case.opened.margins) for _, case in pairs]
    return _line(name, [s.states for s, _ in pairs], [c.opened.states for _, c in pairs], drawn)


def _read(bench: Bench, decoder: Decoder, sent: Sequence[Sent], *, together: bool) -> list[Replay]:
    engine = bench.shop.engine(decoder)
    groups = [sent] if together else [[one] for one in sent]
    return [
        replay
        for group in groups
        for replay in engine.replay([bench.prompt(one.index) for one in group], [one.tokens for one in group])
    ]


def _prefilled(
    bench: Bench, name: str, decoder: Decoder, sent: Sequence[Sent], right: Sequence[Replay], together: bool
) -> Noise:
    made = _read(bench, decoder, sent, together=together)
    rule, drawn = bench.shop.sampling, []
    for one, prover, verifier in zip(sent, made, right, strict=True):
        places_n = torch.arange(len(one.tokens))
        seeds_n = torch.full_like(places_n, bench.seed(one.index))
        tokens_n, _ = sample(prover.logits(), seeds_n, places_n, rule)
        drawn.append(margins(verifier.logits(), tokens_n, seeds_n, places_n, rule, "distance"))
    return _line(name, [m.states for m in made], [r.states for r in right], drawn)


def _line(
    name: str, proven: Sequence[torch.Tensor], replayed: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor]
) -> Noise:
    toploc, projected = VERIFIERS["toploc-strict"], VERIFIERS["projection"]
    chunks: list[ChunkScore] = []
    sequences: list[float] = []
    distances: list[float] = []
    for states_nD, own_nD in zip(proven, replayed, strict=True):
        proofs = VERIFIERS["toploc-paper"].commitments(states_nD)
        chunks += verify_proofs(own_nD, proofs, mode="published", thresholds=UNBOUNDED).chunks
        strict = verify_proofs(own_nD, toploc.commitments(states_nD), thresholds=UNBOUNDED).chunks
        sequences.append(float(np.mean([total_distance(chunk) / chunk.values for chunk in strict])))
        distances.append(_distance(projected.commitments(states_nD), own_nD))
    margin = [mean_margin(clipped(m.float().clamp(min=0)).numpy()) for m in drawn]
    return Noise(
        prover=name,
        answers=len(proven),
        mismatches=_spread([c.exponent_mismatches for c in chunks]),
        mantissa=_spread([c.mantissa_mean for c in chunks]),
        sequence=_spread(sequences),
        projection=_spread(distances),
        margin=_spread(margin),
        match_rate=float(np.mean(np.concatenate([(m <= 0).numpy() for m in drawn]))),
    )


def _distance(sent: Sequence[bytes], own_nD: torch.Tensor) -> float:
    committed = torch.cat([decode(raw) for raw in sent])
    return float(relative_distances(committed, project(own_nD, PROJECTIONS).cpu()).mean())


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    x = np.asarray(values, dtype=np.float64)
    low, high, top = np.median(x), np.quantile(x, 0.99), x.max()
    return float(f"{low:.4g}"), float(f"{high:.4g}"), float(f"{top:.4g}")


def markdown(found: Sequence[Noise], command: str, limits: Mapping[str, float] | None = None) -> str:
    """The atlas as a table, and how far the limits in force are above it."""
    lines = [
        f"`{command}`: median / 99 % quantile / largest, by the chunk of 32 tokens (first two) or by the answer.",
        "",
        "| prover | answers | exponent mismatches | mantissa mean | toploc-sequence | projection | margin, logits | "
        "tokens equal |",
        "| " + " | ".join(["---"] * 8) + " |",
    ]
    for line in found:
        spreads = (line.mismatches, line.mantissa, line.sequence, line.projection, line.margin)
        columns = " | ".join(" / ".join(f"{value:.3g}" for value in spread) for spread in spreads)
        lines.append(f"| {line.prover} | {line.answers} | {columns} | {100 * line.match_rate:.2f} % |")
    return "\n".join([*lines, *_budget(found, limits or {})]) + "\n"


def _budget(found: Sequence[Noise], limits: Mapping[str, float]) -> list[str]:
    """The limits in force against the largest noise of any kind."""
    scores = {"toploc-sequence": "sequence", "projection": "projection", "sampling-proof": "margin"}
    known = {name: field for name, field in scores.items() if name in limits}
    if not known:
        return []
    lines = [
        "",
        "## Limits against this noise",
        "",
        f"Each limit's budget is {100 * FALSE_POSITIVE_BUDGET:g} % of honest answers (`stats.limit_for`), set on other "
        "answers than these. All prefills read the same answers, so their lines are no independent ones.",
        "",
        "| score | limit | largest noise | kinds above the limit |",
        "| --- | --- | --- | --- |",
    ]
    for name, field in known.items():
        largest = [(getattr(line, field)[2], line.prover) for line in found]
        above = [prover for value, prover in largest if value > limits[name]]
        lines.append(f"| {name} | {limits[name]:.4g} | {max(largest)[0]:.4g} | {'; '.join(above) or 'none'} |")
    return lines
