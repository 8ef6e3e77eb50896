"""Prices of work: hand-computed quantities, the closed form against a loop, memory as a hard limit, the catalogue."""

from __future__ import annotations

import copy
import subprocess
import sys
import timeit
from math import isclose
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.work import Backward, Forward, Hash, ModelSize, Prove, Seconds, Several, Spread, Verify
from sim import roofline
from sim.catalogue import CATALOGUE_PATH, Catalogue, CatalogueError, UnknownDevice, check, load_catalogue, read_toml
from sim.hardware import Device, OutOfMemory, Rates, find_device, known_devices

LLAMA_8B = ModelSize(
    name="Llama-3.1-8B",
    layers=32,
    hidden=4096,
    query_heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128256,
)
QWQ_32B = ModelSize(
    name="QwQ-32B",
    layers=64,
    hidden=5120,
    query_heads=40,
    kv_heads=8,
    head_dim=128,
    intermediate=27648,
    vocabulary=152064,
)
MIXTURE = ModelSize(
    name="mixture",
    layers=3,
    hidden=64,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=0,
    vocabulary=101,
    experts=16,
    experts_active=2,
    expert_intermediate=32,
)


def ideal_device(**changes: Any) -> Device:
    """1 TFLOP/s, 1 GB/s, every share 1 and no overhead: seconds are quantities over 1e12 and 1e9."""
    rates = Rates(
        prefill=1.0,
        decode=1.0,
        overlap=1.0,
        attention=1.0,
        activation=float("inf"),
        backward=1.0,
        optimizer=1.0,
        proof=1.0,
        verification=1.0,
        prove_terms_per_s=1e6,
        verify_terms_per_s=2e6,
        hash_bytes_per_s=1e9,
        host_cores=3.0,
        core_efficiency=0.5,
        overhead_call_s=0.0,
        overhead_step_s=0.0,
        overhead_layer_s=0.0,
        memory_fraction=1.0,
        parallel_efficiency=0.5,
    )
    figures: dict[str, Any] = {"memory_bytes": 1e15, "bandwidth_bytes_per_s": 1e9, "peak_flop_per_s": 1e12}
    return Device(name="ideal", kind="gpu", rates=rates, **(figures | changes))


# ---- quantities, by hand


def test_kv_bytes_of_a_gqa_model_count_keys_and_values_once() -> None:
    # 32 layers x 8 KV heads x 128 x (key and value) x 2 bytes; queries are not cached
    assert roofline.kv_bytes_per_token(LLAMA_8B) == 32 * 8 * 128 * 2 * 2 == 131072


def test_kv_bytes_follow_the_cache_number_format_and_the_model() -> None:
    eight_bit = ModelSize(**{f: getattr(LLAMA_8B, f) for f in LLAMA_8B.__slots__} | {"bytes_per_kv": 1.0})
    assert roofline.kv_bytes_per_token(eight_bit) == 65536
    assert roofline.kv_bytes_per_token(QWQ_32B) == 64 * 8 * 128 * 2 * 2 == 262144


def test_stages_hold_together_the_bytes_of_the_whole() -> None:
    """Per-stage bytes add up to the cluster's: nothing counted twice, nothing lost."""
    base = {field: getattr(LLAMA_8B, field) for field in LLAMA_8B.__slots__}
    first = ModelSize(**base | {"layers": 13, "with_head": False})
    last = ModelSize(**base | {"layers": 19, "with_embedding": False})
    assert first.weight_bytes + last.weight_bytes == LLAMA_8B.weight_bytes
    assert roofline.kv_bytes_per_token(first) + roofline.kv_bytes_per_token(last) == 131072
    read = [roofline.weight_bytes_read(model, 7) for model in (first, last, LLAMA_8B)]
    assert read[0] + read[1] == read[2]


def test_weight_bytes_of_llama_8b() -> None:
    attention = 4096 * (32 * 128 + 2 * 8 * 128) + 32 * 128 * 4096
    layer = attention + 3 * 4096 * 14336
    assert LLAMA_8B.weights == 32 * layer + 2 * 128256 * 4096 == 8_029_995_008
    # one pass reads everything but the embedding, which is looked up
    assert roofline.weight_bytes_read(LLAMA_8B, 1) == 2 * (32 * layer + 128256 * 4096)


@pytest.mark.parametrize(("hidden", "expected"), [(5120, 20480), (7168, 28672)])
def test_pipeline_hop_carries_hidden_and_residual(hidden: int, expected: int) -> None:
    """Published figures: 20 480 bytes a token and hop for QwQ-32B, 28 672 for DeepSeek-R1."""
    model = ModelSize(
        name="m", layers=1, hidden=hidden, query_heads=8, kv_heads=8, head_dim=8, intermediate=8, vocabulary=8
    )
    assert roofline.hop_bytes_per_token(model) == expected


def test_attention_flop_equal_a_count_key_by_key() -> None:
    batch, new, past = 3, 5, 7
    work = Forward(model=LLAMA_8B, batch=batch, new_tokens=new, past_tokens=past)
    keys_seen = batch * sum(past + j + 1 for j in range(new))
    # q·k is 2·d FLOP a head and key, weight·v another 2·d
    assert roofline.forward_cost(work).attention_flop == 32 * 32 * keys_seen * 4 * 128


def test_experts_hit_match_a_draw() -> None:
    assert roofline.experts_hit(16, 2, 1) == pytest.approx(2.0)
    assert roofline.experts_hit(16, 2, 10_000) == pytest.approx(16.0)
    rng = np.random.default_rng(11)
    tokens, trials = 13, 4000
    hits = [len({e for _ in range(tokens) for e in rng.choice(16, 2, replace=False)}) for _ in range(trials)]
    error = np.std(hits) / np.sqrt(trials)
    assert abs(np.mean(hits) - roofline.experts_hit(16, 2, tokens)) < 4 * error


def test_mixture_reads_more_weights_in_a_larger_batch_but_never_more_than_it_has() -> None:
    reads = [roofline.weight_bytes_read(MIXTURE, tokens) for tokens in (1, 2, 8, 64, 100_000)]
    assert reads == sorted(reads) and reads[0] < reads[1]
    embedding = MIXTURE.vocabulary * MIXTURE.hidden
    assert reads[-1] <= (MIXTURE.weights - embedding) * 2
    assert reads[0] == pytest.approx(MIXTURE.weights_active * 2 + 0.0)


# ---- prices, by hand


def test_decode_step_reads_the_weights_once_and_the_cache_of_each_sequence() -> None:
    batch, past = 4, 999
    work = Forward(model=LLAMA_8B, batch=batch, new_tokens=1, past_tokens=past)
    weights_s = roofline.weight_bytes_read(LLAMA_8B, 1) / 1e9
    cache_s = batch * (past + 1) * 131072 / 1e9
    # 2·P·4 FLOP take 0.06 s at 1 TFLOP/s, far below the 15 s of reading
    assert ideal_device().price(work) == pytest.approx(weights_s + cache_s, rel=1e-12)


def test_prefill_is_bound_by_arithmetic() -> None:
    tokens = 4096
    work = Forward(model=LLAMA_8B, batch=1, new_tokens=tokens)
    matmul_s = 2 * LLAMA_8B.weights_active * tokens / 1e12
    attention_s = 32 * 32 * 4 * 128 * tokens * (tokens + 1) / 2 / 1e12
    assert ideal_device().price(work) == pytest.approx(matmul_s + attention_s, rel=1e-12)


@given(
    a=st.integers(0, 50),
    a_growth=st.integers(0, 9),
    b=st.integers(0, 50),
    b_growth=st.integers(0, 9),
    count=st.integers(1, 60),
)
def test_closed_sum_equals_the_loop(a: int, a_growth: int, b: int, b_growth: int, count: int) -> None:
    loop = sum(max(a + i * a_growth, b + i * b_growth) for i in range(count))
    assert isclose(roofline.sum_of_larger(a, a_growth, b, b_growth, count), loop, rel_tol=1e-12, abs_tol=1e-9)


def test_a_whole_decode_costs_its_steps() -> None:
    device = find_device("RTX 4090")
    steps, past = 37, 11
    whole = device.price(Forward(model=LLAMA_8B, batch=3, new_tokens=1, past_tokens=past, steps=steps))
    each = [device.price(Forward(model=LLAMA_8B, batch=3, new_tokens=1, past_tokens=past + i)) for i in range(steps)]
    assert whole - device.rates.overhead_call_s == pytest.approx(sum(each) - steps * device.rates.overhead_call_s)


def test_training_costs_three_forwards_and_the_optimizer() -> None:
    work = Backward(model=LLAMA_8B, tokens=1000, sequence_tokens=500, optimizer_steps=2)
    forward_flop = 2 * LLAMA_8B.weights_active * 1000 + 32 * 32 * 4 * 128 * 1000 * 501 / 2
    # gradient read 2, weight written 2, fp32 state of 12 read and written
    update_bytes = 2 * LLAMA_8B.weights * (2 + 2 + 24)
    assert ideal_device().price(work) == pytest.approx(3 * forward_flop / 1e12 + update_bytes / 1e9)


def test_proofs_cost_a_scan_and_their_polynomials() -> None:
    # 65 tokens in chunks of 32: three polynomials of 128² terms
    scan_s = 65 * 4096 * 2 / 1e9
    prove = ideal_device().price(Prove(tokens=65, hidden=4096))
    verify = ideal_device().price(Verify(tokens=65, hidden=4096))
    assert prove == pytest.approx(scan_s + 3 * 128**2 / 1e6)
    assert verify == pytest.approx(scan_s + 3 * 128**2 / 2e6)


def test_hash_seconds_and_several() -> None:
    device = ideal_device()
    parts = (Hash(size_bytes=500_000_000), Seconds(duration_s=1.25), Several(parts=()))
    assert device.price(Several(parts=parts)) == pytest.approx(0.5 + 1.25)


def test_pieces_spread_over_the_cores_of_the_host_and_the_last_round_is_not_shared() -> None:
    device = ideal_device()  # 3 cores, half as fast together
    piece = Hash(size_bytes=500_000_000)
    assert device.price(Spread(piece, 1)) == device.price(piece) == 0.5
    assert [device.price(Spread(piece, count)) for count in (0, 2, 3, 4, 7)] == [0.0, 1.0, 1.0, 2.0, 3.0]
    assert device.times(2).cores == 6 and device.times(2).price(Spread(piece, 7)) == 2.0
    assert find_device("H100 SXM").cores > find_device("RTX 4090").cores > find_device("CPU").cores == 2


def test_empty_work_has_a_price_without_division_by_zero() -> None:
    device = find_device("RTX 4090")
    assert device.price(Prove(tokens=0, hidden=64)) == device.rates.overhead_call_s
    assert device.price(Hash(size_bytes=0)) == device.rates.overhead_call_s


def test_price_depends_on_the_model() -> None:
    prices = [ideal_device().price(Forward(model=model, batch=1, new_tokens=1)) for model in (LLAMA_8B, QWQ_32B)]
    assert prices[1] / prices[0] == pytest.approx(QWQ_32B.weights_active / LLAMA_8B.weights_active, rel=1e-3)


def test_impossible_work_is_refused() -> None:
    device = find_device("RTX 4090")
    with pytest.raises(ValueError, match=r"batch=0.*cannot be priced; expected batch and new_tokens of at least 1"):
        device.price(Forward(model=LLAMA_8B, batch=0, new_tokens=1))
    with pytest.raises(ValueError, match="duration_s of at least 0"):
        device.price(Seconds(duration_s=-1.0))


@given(batch=st.integers(1, 40), past=st.integers(0, 3000), factor=st.integers(2, 5))
def test_price_never_falls_with_more_work(batch: int, past: int, factor: int) -> None:
    device = ideal_device()
    base = device.price(Forward(model=LLAMA_8B, batch=batch, new_tokens=1, past_tokens=past))
    assert device.price(Forward(model=LLAMA_8B, batch=batch * factor, new_tokens=1, past_tokens=past)) >= base
    assert device.price(Forward(model=LLAMA_8B, batch=batch, new_tokens=1, past_tokens=past + factor)) >= base
    assert device.price(Forward(model=LLAMA_8B, batch=batch, new_tokens=1, past_tokens=past, steps=factor)) >= base


def test_a_known_price_is_found_in_under_three_microseconds() -> None:
    device = find_device("RTX 4090")
    work = Forward(model=LLAMA_8B, batch=8, new_tokens=1, past_tokens=100, steps=50)
    device.price(work)
    calls = 20_000
    assert min(timeit.repeat(lambda: device.price(work), number=calls, repeat=5)) / calls < 3e-6


# ---- memory


def test_work_that_does_not_fit_says_what_was_asked_and_what_is_there() -> None:
    with pytest.raises(OutOfMemory) as caught:
        find_device("RTX 4090").price(Forward(model=QWQ_32B, batch=2, new_tokens=100))
    sentence = str(caught.value)
    for part in ("2 sequence(s) of 100 tokens through QwQ-32B", "RTX 4090 has 24.00 GB", "90%", "21.60 GB"):
        assert part in sentence
    assert caught.value.args == (sentence,)  # exactly one argument, so that a copy is whole


def test_batch_max_is_the_last_batch_that_fits() -> None:
    device = find_device("RTX 4090")
    most = device.batch_max(LLAMA_8B, 8192)
    # (21.6 GB − 16.06 GB of weights) over 8192 · 131072 bytes a sequence
    assert most == 5
    device.price(Forward(model=LLAMA_8B, batch=most, new_tokens=1, past_tokens=8191))
    with pytest.raises(OutOfMemory):
        device.price(Forward(model=LLAMA_8B, batch=most + 1, new_tokens=1, past_tokens=8191))
    assert device.batch_max(QWQ_32B, 1) == 0 and not device.fits(QWQ_32B, 1, 1)


def test_training_holds_gradients_and_optimizer_state() -> None:
    work = Backward(model=LLAMA_8B, tokens=100, sequence_tokens=100)
    # bf16 weight and gradient, fp32 copy and two moments: 16 bytes a weight
    assert roofline.backward_memory(work).total == pytest.approx(16 * LLAMA_8B.weights, rel=1e-3)
    with pytest.raises(OutOfMemory, match=r"training Llama-3\.1-8B"):
        find_device("H100 SXM").price(work)
    find_device("2x H100 SXM").price(work)


# ---- several devices as one


def test_several_devices_add_memory_and_lose_some_speed() -> None:
    one, four = ideal_device(), ideal_device().times(4)
    work = Forward(model=LLAMA_8B, batch=1, new_tokens=1)
    assert four.memory_bytes == 4 * one.memory_bytes
    assert one.price(work) / four.price(work) == pytest.approx(4 * 0.5)  # parallel_efficiency 0.5
    assert one.times(1).price(work) == one.price(work)
    assert find_device("8x h100-sxm").name == "8x H100 SXM"


# ---- catalogue


def test_every_device_of_the_catalogue_prices_and_names_its_sources() -> None:
    catalogue = load_catalogue()
    assert len(known_devices()) >= 22
    for entry in catalogue.device:
        assert find_device(entry.name).price(Seconds(duration_s=2.0)) == 2.0
        assert entry.bf16_tflop_s.basis == "dense"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("A100 SXM 40GB", "memory_bandwidth_gb_s", 1555),  # not the 80 GB card's 1935
        ("RTX 4090", "bf16_tflop_s", 165.2),  # not the non-tensor 82.6
        ("RTX A6000", "bf16_tflop_s", 154.8),  # not the non-tensor 38.7
        ("MI300X", "bf16_tflop_s", 1307),  # not the sparse 2615
    ],
)
def test_figures_that_other_catalogues_have_wrong(name: str, field: str, value: float) -> None:
    assert getattr(load_catalogue().find(name), field).value == value


def test_equal_names_are_one_device() -> None:
    assert find_device("RTX 4090") is find_device("RTX 4090")
    assert find_device("rtx4090").name == "RTX 4090"


def test_unknown_device_lists_close_and_known_names() -> None:
    with pytest.raises(UnknownDevice) as caught:
        find_device("RTX 4900")
    sentence = str(caught.value)
    assert "device 'RTX 4900' is not in the catalogue. Did you mean 'RTX 4090'" in sentence
    assert all(name in sentence for name in known_devices())


def broken(change: Any) -> str:
    raw = copy.deepcopy(read_toml(CATALOGUE_PATH))
    change(raw)
    with pytest.raises(CatalogueError) as caught:
        check(Catalogue, raw, "mine.toml")
    return str(caught.value)


def test_a_sparse_figure_does_not_load() -> None:
    sentence = broken(lambda raw: raw["device"][1]["bf16_tflop_s"].update(basis="sparse", value=330))
    assert "mine.toml: device 'RTX 4090' bf16_tflop_s basis is 'sparse'" in sentence and "'dense'" in sentence


def test_wrong_figures_are_refused_with_file_field_value_and_expectation() -> None:
    sentence = broken(lambda raw: raw["device"][0]["memory_gb"].update(value=-24))
    assert "mine.toml: device 'RTX 3090' memory_gb value is -24" in sentence and "greater than 0" in sentence
    wrong_unit = broken(lambda raw: raw["device"][0].update(tflops=3))
    assert wrong_unit == "mine.toml: device 'RTX 3090' tflops = 3 is no field here; did you mean bf16_tflop_s?"
    assert "accumulate" in broken(lambda raw: raw["device"][0]["bf16_tflop_s"].pop("accumulate"))
    assert "source 'a blog' is not listed" in broken(lambda raw: raw["device"][0]["memory_gb"].update(source="a blog"))
    assert "names both 'RTX 3090' and 'RTX 4090'" in broken(lambda raw: raw["device"][1].update(aliases=["rtx-3090"]))


def test_simulator_hardware_does_not_import_torch() -> None:
    code = "import sim.hardware, sim.catalogue, sim.roofline, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
