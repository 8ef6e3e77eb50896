"""The cut of a chain over unequal devices: equal to brute force where it claims to be exact; a reason where none is."""

import itertools
import time

import numpy as np
import pytest

from refimpl.pipeline.partition import Chain, Device, Links, NoCut, Partition, chain_of, partition, uniform_links
from refimpl.work import ModelSize


def brute_force(chain, devices, links, weight, free):
    """The least (cycle, latency) over every ordered subset and every composition, straight from the definition."""
    layers, best = len(chain.layer_bytes), None
    transfer_s = np.zeros_like(links.latency_s) if links.transfer_s is None else links.transfer_s
    for used in range(1, min(layers, len(devices)) + 1):
        picks = itertools.permutations if free else itertools.combinations
        for chosen in picks(range(len(devices)), used):
            hops = list(itertools.pairwise(chosen))
            hop_s = sum(links.latency_s[h] + transfer_s[h] for h in hops)
            hop_s += links.latency_s[chosen[-1], chosen[0]] if used > 1 else 0
            if not np.isfinite(hop_s):
                continue
            for inner in itertools.combinations(range(1, layers), used - 1):
                edges = (0, *inner, layers)
                times = []
                for d, first, end in zip(chosen, edges, edges[1:], strict=False):
                    device = devices[d]
                    if chain.needs_bytes(first, end) > device.memory_bytes:
                        break
                    layer_s = device.layer_s if isinstance(device.layer_s, tuple) else (device.layer_s,) * layers
                    ends_s = device.embedding_s * (first == 0) + device.head_s * (end == layers)
                    times.append(sum(layer_s[first:end]) + ends_s)
                else:
                    bottleneck_s = max(times + [transfer_s[h] for h in hops])
                    latency_s = sum(times) + hop_s
                    cycle_s = bottleneck_s if np.isinf(weight) else max(weight * bottleneck_s, latency_s)
                    if best is None or (cycle_s, latency_s) < best:
                        best = (cycle_s, latency_s)
    return best


def random_problem(rng):
    """Small, in whole numbers (so sums are exact), with missing links, unequal ends and tight memory."""
    layers, count = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    uneven = rng.random() < 0.5
    layer_bytes = rng.integers(1, 5, layers) if uneven else np.full(layers, 2)
    chain = Chain(
        layer_bytes=tuple(float(x) for x in layer_bytes),
        embedding_bytes=float(rng.integers(0, 3)),
        head_bytes=float(rng.integers(0, 3)),
        tied=bool(rng.random() < 0.3),
        stage_bytes=float(rng.integers(0, 2)),
    )
    kinds = [
        (
            float(rng.integers(2, 14)),
            tuple(float(x) for x in rng.integers(1, 9, layers)) if rng.random() < 0.3 else float(rng.integers(1, 9)),
            float(rng.integers(0, 3)),
            float(rng.integers(0, 4)),
        )
        for _ in range(count)
    ]
    share = rng.random() < 0.4  # several devices of one kind
    devices = []
    for i in range(count):
        memory, layer_s, embedding_s, head_s = kinds[int(rng.integers(0, 2)) % count if share else i]
        devices.append(
            Device(name=f"d{i}", memory_bytes=memory, layer_s=layer_s, embedding_s=embedding_s, head_s=head_s)
        )
    if rng.random() < 0.3:
        links = uniform_links(count, float(rng.integers(0, 6)), float(rng.integers(0, 6)))
    else:
        latency_s = rng.integers(0, 12, (count, count)).astype(float)
        latency_s[rng.random((count, count)) < 0.15] = np.inf
        links = Links(latency_s=latency_s, transfer_s=rng.integers(0, 9, (count, count)).astype(float))
    return chain, devices, links


def check(result: Partition, chain, devices, links, weight):
    """The cut is contiguous and whole, fits, and its figures follow from the definition."""
    names = [device.name for device in devices]
    edges = [stage.first for stage in result.stages] + [result.stages[-1].end]
    assert edges[0] == 0 and edges[-1] == len(chain.layer_bytes)
    assert [stage.end for stage in result.stages] == edges[1:] and all(a < b for a, b in itertools.pairwise(edges))
    used = [stage.device for stage in result.stages]
    assert len(set(used)) == len(used)
    for stage in result.stages:
        assert chain.needs_bytes(stage.first, stage.end) <= devices[names.index(stage.device)].memory_bytes


@pytest.mark.parametrize("order", ["given", "free"])
@pytest.mark.parametrize("weight", [1.0, 2.0, 5.0, np.inf])
def test_equals_brute_force_on_random_small_problems(order, weight):
    """Exact for small cases: 500 problems for each order and number of micro-batches, 4000 in all."""
    rng = np.random.default_rng([len(order), int(min(weight, 99))])
    feasible = 0
    for _ in range(500):
        chain, devices, links = random_problem(rng)
        want = brute_force(chain, devices, links, weight, order == "free")
        options = {
            "objective": "latency" if weight == 1.0 else "throughput",
            "micro_batches": None if np.isinf(weight) else int(weight),
            "order": order,
        }
        if want is None:
            with pytest.raises(NoCut):
                partition(chain, devices, links, **options)
            continue
        feasible += 1
        got = partition(chain, devices, links, **options)
        assert got.exact
        check(got, chain, devices, links, weight)
        assert (got.cycle_s, got.latency_s) == want, (chain, devices, links)
    assert 150 < feasible < 500, "the problems must be of both sorts"


def test_local_search_is_never_better_than_exact_and_close_on_small_problems():
    """A dull twin the other way round: where both can run, the local search may lose a little, and never wins."""
    rng = np.random.default_rng(3)
    ratios = []
    while len(ratios) < 150:
        chain, devices, links = random_problem(rng)
        try:
            exact = partition(chain, devices, links, objective="throughput", micro_batches=3)
        except NoCut:
            continue
        try:
            found = partition(chain, devices, links, objective="throughput", micro_batches=3, work_max=0)
        except NoCut:  # several orders were tried, none of them was one that fits
            ratios.append(np.inf)
            continue
        assert not found.exact and found.cycle_s >= exact.cycle_s
        check(found, chain, devices, links, 3)
        ratios.append(found.cycle_s / exact.cycle_s)
    assert np.mean(np.array(ratios) == 1.0) > 0.95


def test_objectives_differ_as_their_names_say():
    """Two fast devices far apart, two slow ones near: one token wants the near ones, a full ring the fast ones."""
    devices = [
        Device(name=name, memory_bytes=4, layer_s=layer_s) for name, layer_s in zip("abcd", (1, 1, 3, 3), strict=True)
    ]
    latency_s = np.full((4, 4), 50.0)
    latency_s[2:, 2:] = 1.0
    chain, links = Chain(layer_bytes=(1.0,) * 8), Links(latency_s=latency_s)
    fast = partition(chain, devices, links, objective="throughput")
    near = partition(chain, devices, links, objective="latency")
    assert {stage.device for stage in fast.stages} >= {"a", "b"} and fast.bottleneck_s <= 4
    assert [stage.device for stage in near.stages] in (["c", "d"], ["d", "c"]) and near.latency_s == 24 + 2


def test_cycle_is_the_larger_of_the_two_terms():
    """C = max(M * tau, N * (tau + lambda)) for an even ring of N = 4, tau = 5, lambda = 7: both sides of the corner."""
    chain = Chain(layer_bytes=(1.0,) * 20)
    devices = [Device(name=str(i), memory_bytes=5, layer_s=1.0) for i in range(4)]
    links = uniform_links(4, hop_s=7.0)
    for micro_batches, cycle_s in ((1, 48), (9, 48), (10, 50), (30, 150)):
        got = partition(chain, devices, links, objective="throughput", micro_batches=micro_batches)
        assert got.cycle_s == cycle_s and len(got.stages) == 4


def test_embedding_and_head_count_where_they_lie():
    """The ends are not free: the device with room for them gets them, and a tied matrix is held once on one stage."""
    chain = Chain(layer_bytes=(2.0, 2.0, 2.0, 2.0), embedding_bytes=5.0, head_bytes=5.0, tied=True)
    big, small = Device(name="big", memory_bytes=9, layer_s=1), Device(name="small", memory_bytes=4, layer_s=1)
    with pytest.raises(NoCut):
        partition(chain, [big, small], uniform_links(2), objective="latency")
    both = [big, small, Device(name="other", memory_bytes=9, layer_s=1)]
    got = partition(chain, both, uniform_links(3), objective="latency")
    assert [s.device for s in got.stages] in (["big", "other"], ["other", "big"])
    one = partition(chain, [Device(name="one", memory_bytes=13, layer_s=1)], uniform_links(1), objective="latency")
    assert one.stages[0].needs_bytes == 13 and one.latency_s == 4


def test_a_model_that_fits_nowhere_says_what_is_missing_and_where():
    """No feasible cut: say what is missing and where: layers, device and bytes are in the sentence."""
    chain = Chain(layer_bytes=(10.0,) * 8)
    devices = [Device(name="left", memory_bytes=25, layer_s=1), Device(name="right", memory_bytes=31, layer_s=1)]
    with pytest.raises(
        NoCut,
        match=r"0..4 fit on 'right', 'left'; layers 5..7 \(30 .* 5 is 5 bytes too much for 'left'.*80.*56",
    ):
        partition(chain, devices, uniform_links(2), objective="latency")
    with pytest.raises(NoCut, match=r"0..4 fit on 'left', 'right'; layers 5..7.* 5 is 9 bytes too much for 'right'"):
        partition(chain, devices, uniform_links(2), objective="latency", order="given")
    with pytest.raises(NoCut, match=r"layer 3 needs 32 bytes .*, the largest device 'right' has 31: 1 bytes short"):
        partition(Chain(layer_bytes=(10.0, 10.0, 10.0, 32.0)), devices, uniform_links(2), objective="latency")


def test_a_one_way_link_is_named():
    """A sees B, B does not see A: refused with the pair, not with "no placement"."""
    chain = Chain(layer_bytes=(10.0,) * 4)
    devices = [Device(name="a", memory_bytes=20, layer_s=1), Device(name="b", memory_bytes=20, layer_s=1)]
    links = Links(latency_s=np.array([[0.0, 1.0], [np.inf, 0.0]]))
    for order in ("given", "free"):
        with pytest.raises(NoCut, match="'a' reaches 'b' but not back"):
            partition(chain, devices, links, objective="latency", order=order)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"objective": "speed"}, "objective is"),
        ({"micro_batches": 0}, "micro_batches is at least 1"),
    ],
)
def test_bad_wishes_are_refused(change, says):
    wish = {"objective": "latency"} | change
    with pytest.raises(ValueError, match=says):
        partition(Chain(layer_bytes=(1.0,)), [Device(name="a", memory_bytes=1, layer_s=1)], uniform_links(1), **wish)


def test_bad_problems_are_refused():
    device = Device(name="a", memory_bytes=1, layer_s=(1.0, 1.0))
    with pytest.raises(ValueError, match="2 layer times, the chain has 1"):
        partition(Chain(layer_bytes=(1.0,)), [device], uniform_links(1), objective="latency")
    with pytest.raises(ValueError, match="names must differ"):
        partition(Chain(layer_bytes=(1.0, 1.0)), [device, device], uniform_links(2), objective="latency")
    with pytest.raises(ValueError, match=r"must be \[1, 1\]"):
        partition(Chain(layer_bytes=(1.0, 1.0)), [device], uniform_links(2), objective="latency")
    with pytest.raises(ValueError, match="at least one layer"):
        Chain(layer_bytes=())


def test_chain_of_a_model_adds_up():
    """Weights and cache over all layers are the model's own; the ends lie apart."""
    model = ModelSize(
        name="m", layers=7, hidden=8, query_heads=4, kv_heads=2, head_dim=2, intermediate=24, vocabulary=50
    )
    chain = chain_of(model, batch=3, length_tokens=11)
    total = sum(chain.layer_bytes) + chain.embedding_bytes + chain.head_bytes
    assert total == pytest.approx(model.weight_bytes + model.kv_bytes_per_token * 33)
    assert chain.head_bytes == 50 * 8 * 2


def test_a_hundred_devices_and_a_hundred_layers_in_seconds():
    """Fast for 100 devices x 100 layers: two kinds of device in two regions, and 100 different ones, in any order."""
    chain = Chain(layer_bytes=(1.0,) * 100, embedding_bytes=1.0, head_bytes=1.0)
    kinds = [(4.0, 3.0), (12.0, 1.0)]
    region = np.arange(100) % 2
    devices = [Device(name=f"n{i}", memory_bytes=kinds[region[i]][0], layer_s=kinds[region[i]][1]) for i in range(100)]
    latency_s = np.where(region[:, None] == region[None, :], 1.0, 20.0)
    began = time.process_time()
    typed = partition(chain, devices, Links(latency_s=latency_s), objective="throughput", micro_batches=8)
    given = partition(chain, devices, Links(latency_s=latency_s), objective="latency", order="given")
    assert typed.exact and given.exact and typed.latency_s <= typed.cycle_s and given.latency_s < np.inf

    rng = np.random.default_rng(5)
    speeds, hops = rng.lognormal(0, 0.5, 100), rng.lognormal(0, 1, (100, 100))
    mixed = [
        Device(name=f"n{i}", memory_bytes=float(rng.integers(3, 20)), layer_s=float(speeds[i])) for i in range(100)
    ]
    found = partition(chain, mixed, Links(latency_s=hops), objective="throughput", micro_batches=4)
    in_order = partition(chain, mixed, Links(latency_s=hops), objective="throughput", micro_batches=4, order="given")
    assert in_order.exact and not found.exact and found.cycle_s < in_order.cycle_s
    assert time.process_time() - began < 60
