"""The arena: one interface for verifiers, exact rates, limits from honest noise, a baseline that goes red."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from refimpl.arena.bench import RECOMPUTED, SETTINGS, Bench
from refimpl.arena.economics import REFERENCE, Stakes, seconds
from refimpl.arena.judge import Rate, calibrate, judge
from refimpl.arena.noise import atlas, tensor_parallel
from refimpl.arena.plugin import Arena
from refimpl.arena.regress import BASELINE, SUITE, Part, accept, differences, regress
from refimpl.arena.report import markdown, results, saved_share
from refimpl.arena.stats import interval, limit_for, roc, separation, upper_bound
from refimpl.arena.verifier import Case, Finding, Verifier
from refimpl.arena.verifiers import POLICIES, VERIFIERS, toploc
from refimpl.attacks.catalogue import ATTACKS
from refimpl.attacks.names import CHEATS
from refimpl.toploc.check import Thresholds
from refimpl.work import Forward, ModelSize

COUNT = 12
SMALL = replace(
    SETTINGS["tiny"], tokens_max=48, batch=COUNT, sequences=COUNT, honest_sequences=COUNT, calibration_sequences=COUNT
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = Bench(SMALL, tmp_path_factory.mktemp("arena"))
    list(made.batches(RECOMPUTED, COUNT))
    return made


@pytest.fixture(scope="module")
def limits(bench: Bench) -> dict[str, float]:
    return calibrate(bench, ["honest", "honest-fp32"], COUNT)


# ---------------------------------------------------------------------------------------------------- statistics
def test_intervals_are_clopper_pearsons() -> None:
    assert interval(0, 200) == pytest.approx((0.0, 1 - 0.025 ** (1 / 200)))
    assert interval(200, 200) == pytest.approx((0.025 ** (1 / 200), 1.0))
    low, high = interval(7, 50)  # each tail holds 2.5 %
    assert scipy_stats.binom.sf(6, 50, low) == pytest.approx(0.025)
    assert scipy_stats.binom.cdf(7, 50, high) == pytest.approx(0.025)
    assert interval(0, 0) == (0.0, 1.0)
    assert upper_bound(0, 598) == pytest.approx(1 - 0.05 ** (1 / 598)) and upper_bound(0, 600) < 0.005
    with pytest.raises(ValueError, match="3 hits in 2 trials"):
        interval(3, 2)


def test_a_limit_is_the_log_normal_quantile_and_never_below_what_was_seen() -> None:
    rng = np.random.default_rng(1)
    scores = np.exp(rng.normal(-2.0, 0.3, 4000))
    exact = math.exp(-2.0 + 0.3 * scipy_stats.norm.ppf(1 - 0.001))
    assert limit_for(scores.tolist(), 1e-3) == pytest.approx(max(exact, scores.max()), rel=0.05)
    assert limit_for([1.0, 1.0, 1.0, 9.0], 1e-3, 0.4) == 9.0
    assert limit_for([0.0] * 9, 0.5) == 0.5, "no noise at all: the least"
    assert limit_for([0.0] * 7 + [2.0] * 2, 0.5) == 4.0, "a heap at nothing has no log-normal tail"
    with pytest.raises(ValueError, match="expected at least 4"):
        limit_for([1.0, 2.0], 1.0)


def test_tokens_needed_follow_the_formula_for_independent_values() -> None:
    """m = ((z_0.99 · σ0 + z_0.99 · σ1) / δ)²."""
    rng = np.random.default_rng(2)
    honest = [rng.normal(0.0, 1.0, 400) for _ in range(400)]
    cheats = [rng.normal(0.3, 1.0, 400) for _ in range(400)]
    expected = (2 * scipy_stats.norm.ppf(0.99) / 0.3) ** 2
    apart = separation(honest, cheats)
    assert apart is not None and apart.tokens() == pytest.approx(expected, rel=0.15)
    assert apart.power(apart.tokens()) == pytest.approx(0.99, abs=0.003)
    same = separation(honest, honest)
    assert same is not None and same.tokens() == math.inf and same.power(1000) == pytest.approx(0.01)


def test_tokens_needed_are_never_fewer_than_a_piece() -> None:
    """Eight neighbours are looked at together, or one chunk of 32: nothing is known of fewer."""
    rng = np.random.default_rng(2)
    honest, cheats = ([rng.normal(mean, 0.1, 40) for _ in range(9)] for mean in (0.0, 5.0))
    by_token, by_chunk = separation(honest, cheats), separation(honest, cheats, tokens_per_value=32)
    assert by_token is not None and by_chunk is not None
    assert by_token.tokens() == 8 and by_chunk.tokens() == 32
    assert separation([np.ones(3)], cheats) is None


def test_the_area_under_a_roc_is_the_chance_to_rank_right() -> None:
    assert roc([1.0, 2.0], [3.0, 4.0])[2] == 1.0
    assert roc([1.0, 3.0], [2.0, 4.0])[2] == 0.75
    assert roc([1.0, math.nan], [1.0])[2] == 0.5


# ------------------------------------------------------------------------------------------------- the interface
def test_every_line_of_the_catalogue_names_verifiers_that_exist_and_says_what_it_is() -> None:
    assert set(CHEATS) <= set(ATTACKS), "behaviours of scenarios are part of the catalogue"
    for name, attack in ATTACKS.items():
        assert attack.says and attack.saves, name
        assert attack.caught_by and set(attack.caught_by) <= set(VERIFIERS), name
    assert all(set(policy.members) <= set(VERIFIERS) for policy in POLICIES.values())
    assert POLICIES["default"].false_positive_budget == pytest.approx(1.5e-3)
    assert POLICIES["published"].false_positive_budget is None, "its thresholds were not set by noise"


def test_a_verifier_is_one_function(bench: Bench) -> None:
    """Somebody's own: its row is made like any other's, and a check that breaks is no verdict."""

    def long_runs(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
        assert case.replay_again is not None and len(case.replay_again().logits(0, 1)) == 1
        assert [len(raw) for raw in sent] == [2]
        return Finding(score=len(case.tokens), verdict=len(case.tokens) <= limit, reason="long")

    own = Verifier(says="own", check=long_runs, limit=1.0, commit=lambda states: bytes(2))
    own = replace(own, check=lambda case, sent, limit: long_runs(case, sent[:1], limit))
    cell = judge(bench, "honest", COUNT, {}, {"own": own})
    assert cell.rate("own") == Rate(hits=COUNT, trials=COUNT)

    def broken(case: Case, sent: Sequence[bytes], limit: float) -> Finding:
        raise RuntimeError("no such thing")

    cell = judge(bench, "honest", COUNT, {}, {"own": Verifier(says="", check=broken, limit=0.0)})
    assert cell.verdicts["own"] == [None] * COUNT and "no such thing" in cell.reasons["own"][0]
    assert cell.rate("own").hits == 0


def test_the_fixture_for_others_asks_the_whole_interval(bench: Bench) -> None:
    arena = Arena(bench, COUNT)
    strict = VERIFIERS["toploc-strict"]
    assert arena.detects(strict, "early-exit", rate_min=0.95).hits == COUNT
    assert arena.accepts_honest(strict, rate_max=0.0).hits == 0
    with pytest.raises(AssertionError, match="cheap-tokens: detects 0"):
        arena.detects(strict, "cheap-tokens", rate_min=0.9)


# ----------------------------------------------------------------------------------------- attacks and verifiers
@pytest.mark.parametrize("behaviour", ["honest", "honest-fp32", "honest-eager", "honest-split"])
def test_honest_noise_is_accepted_by_the_default_policy(bench: Bench, limits: dict[str, float], behaviour: str) -> None:
    assert judge(bench, behaviour, COUNT, limits).rate("default").hits <= 1


HOLES = {  # attack -> (who misses it, who catches it, how much of it at least)
    "sign-flipped": ("toploc-paper", "toploc-strict", 0.9),
    "proofs-too-few": ("toploc-paper", "toploc-strict", 0.9),
    "outside-top-k": ("toploc-strict", "projection", 0.9),
    "human-text": ("toploc-strict", "sampling-proof", 0.9),
    "repeated-text": ("toploc-strict", "exact-match", 0.9),
    "wrong-seed": ("toploc-strict", "sampling-proof", 0.5),  # the tiny model is often sure of its token: few races
    "draft-corrected": ("toploc-strict", "sampling-proof", 0.5),
    "cut-early": ("sampling-proof", "termination-calibrated", 0.9),
    "cut-with-end": ("toploc-strict", "termination-seed", 0.7),
    "proofs-null": ("exact-match", "default", 0.9),
    "proof-copied": ("exact-match", "default", 0.9),
}


@pytest.mark.parametrize(("attack", "missed", "caught", "least"), [(a, *who) for a, who in HOLES.items()])
def test_a_hole_of_one_verifier_is_closed_by_another(
    bench: Bench, limits: dict[str, float], attack: str, missed: str, caught: str, least: float
) -> None:
    cell = judge(bench, attack, COUNT, limits)
    assert cell.rate(missed).value <= 0.2, cell.reasons.get(missed, missed)
    assert cell.rate(caught).value >= least, cell.reasons.get(caught, caught)


def test_calibrated_tests_of_the_text_spare_honest_answers_where_the_published_figures_do_not(
    bench: Bench, limits: dict[str, float]
) -> None:
    for behaviour in ("honest", "honest-eager"):
        cell = judge(bench, behaviour, COUNT, limits)
        assert cell.rate("shape").value > 0.3, "the published figures suit large models"
        for name in ("shape-calibrated", "termination-calibrated", "termination-seed"):
            assert cell.rate(name).hits == 0, cell.reasons[name]


def test_an_honest_answer_is_not_generated_again_for_an_attack_that_begins_with_it(bench: Bench) -> None:
    honest = [sent for batch in bench.batches("honest", COUNT) for sent in batch.sent]
    engine = bench.shop.engine(bench.shop.decoder())
    engine.engine = None  # type: ignore[assignment]  # whoever generates now, fails
    prompts, seeds = [bench.prompt(s.index) for s in honest], [bench.seed(s.index) for s in honest]
    again = engine.answer(prompts, seeds)
    assert [a.tokens.tolist() for a in again] == [s.tokens.tolist() for s in honest]
    assert [a.proofs for a in again] == [VERIFIERS["toploc-strict"].commitments(s.states) for s in honest]
    with pytest.raises(AttributeError):
        engine.answer(prompts, [seed + 1 for seed in seeds])


def test_an_adaptive_cheat_is_counted_where_it_cheats(bench: Bench, limits: dict[str, float]) -> None:
    cell = judge(bench, "one-in-four", COUNT, limits)
    assert cell.rate("default").trials == sum(cell.cheated) == COUNT // 4


def test_an_answer_that_came_out_honest_is_no_cheat(bench: Bench) -> None:
    honest = {s.index: s for batch in bench.batches("honest", COUNT) for s in batch.sent}
    for name in ("best-of-4", "cut-early", "padded", "in-the-tail"):
        sent = [s for batch in bench.batches(name, COUNT) for s in batch.sent]
        for one in sent:
            equal = np.array_equal(one.tokens, honest[one.index].tokens)
            if name == "in-the-tail":
                assert one.cheated == (len(one.tokens) > 0.75 * SMALL.tokens_max), "it is honest before the tail"
            else:
                assert one.cheated == (not equal), (name, one.index)
        assert any(one.cheated for one in sent), name


def test_each_kind_of_honest_worker_has_prompts_of_its_own(bench: Bench) -> None:
    kinds = [{s.index for b in bench.batches(name, COUNT) for s in b.sent} for name in ("honest", "honest-fp32")]
    assert kinds[0] == set(range(COUNT)) and not kinds[0] & kinds[1]


def test_sequences_of_changed_code_are_made_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.made("honest", COUNT)
    monkeypatch.setattr("refimpl.arena.bench.code_of", lambda behaviour: "changed")
    assert not bench.made("honest", COUNT)


def test_what_was_made_is_made_once(bench: Bench) -> None:
    before = {path: path.stat().st_mtime_ns for path in bench.folder.rglob("*.pt")}
    again = Bench(SMALL, bench.folder.parent)
    assert [s.index for batch in again.batches("honest", COUNT) for s in batch.sent] == list(range(COUNT))
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())


def test_the_tables_hold_every_cell(bench: Bench, limits: dict[str, float]) -> None:
    cells = {name: judge(bench, name, COUNT, limits) for name in ("honest", "early-exit")}
    found = results(bench, cells, limits)
    assert found["cells"]["early-exit"]["rejected"]["default"] == [COUNT, COUNT]
    assert found["bytes_per_token"]["projection"] == pytest.approx(16 + 8 / 32, abs=0.5)
    assert 0.2 < found["cells"]["early-exit"]["saved_share"] < 0.6  # two of five layers are left out
    text = markdown(json.loads(json.dumps(found)), "a command")
    assert "| early-exit | 12 |" in text and "`a command`" in text


# ----------------------------------------------------------------------------------------------------- economics
def test_break_even_is_where_profit_is_zero() -> None:
    stakes = Stakes(pay=1.2, stake=100.0)
    even = stakes.break_even(0.5, 0.9)
    assert even == pytest.approx(0.5 / (0.9 * 101.2))
    assert stakes.profit(0.5, 0.9, even) == pytest.approx(0.0)
    assert stakes.break_even(0.5, 0.0) == math.inf and stakes.break_even(0.5, 0.001) == math.inf
    assert stakes.break_even(-0.1, 0.5) == 0.0


def test_a_decode_step_costs_its_bytes_and_a_prefill_its_products() -> None:
    size = ModelSize(
        name="m", layers=2, hidden=64, query_heads=4, kv_heads=2, head_dim=16, intermediate=128, vocabulary=512
    )
    step = Forward(model=size, batch=1, new_tokens=1, past_tokens=0, steps=1)
    read = size.weight_bytes + 0.5 * size.kv_bytes_per_token
    assert seconds(step) == pytest.approx(read / REFERENCE.bytes_per_s)
    assert seconds(replace(step, model=replace(size, bytes_per_weight=1.0))) < 0.51 * seconds(step)
    prefill = Forward(model=size, batch=64, new_tokens=1000)
    assert seconds(prefill) == pytest.approx(2 * size.weights_active * 64_000 / REFERENCE.flop_per_s)


def test_who_cheats_in_one_answer_of_four_saves_about_a_quarter_of_what_always_cheating_saves(bench: Bench) -> None:
    always, sometimes = (saved_share(bench, name, COUNT) for name in ("weights-4bit", "one-in-four"))
    assert always > 0.4 and 0.1 * always < sometimes < 0.5 * always, (always, sometimes)


# ---------------------------------------------------------------------------------------------------- regression
def rates(**counts: dict[str, list[int]]) -> dict[str, Any]:
    return {name.replace("_", "-"): verifiers for name, verifiers in counts.items()}


def test_only_a_change_for_the_worse_is_a_regression() -> None:
    before = rates(honest={"v": [0, 100]}, greedy={"v": [90, 100], "w": [50, 100]})
    assert list(differences(before, before)) == []
    better = rates(honest={"v": [0, 100]}, greedy={"v": [100, 100], "w": [90, 100]})
    assert list(differences(before, better)) == []
    (fell,) = differences(before, rates(honest={"v": [0, 100]}, greedy={"v": [60, 100], "w": [50, 100]}))
    assert fell.startswith("greedy before v: detection fell from 90 of 100") and "p = " in fell
    rose = list(differences(before, rates(honest={"v": [12, 100]}, greedy={"v": [90, 100], "w": [50, 100]})))
    assert rose[0].startswith("honest before v: false positives rose from 0 of 100")
    assert rose[1].startswith("all honest workers before v: false positives rose from 0 of 100")
    (gone,) = differences(before, rates(honest={"v": [0, 100]}, greedy={"v": [90, 100]}))
    assert gone == "greedy before w: not measured any more"
    (fewer,) = differences(before, rates(honest={"v": [0, 100]}, greedy={"v": [0, 0], "w": [50, 100]}))
    assert fewer == "greedy before v: only 0 answers count, 100 did"


def test_false_positives_that_are_spread_over_honest_workers_add_up() -> None:
    names = ("honest", "honest-fp32", "honest-eager", "honest-split")
    before, now = ({name: {"v": [hits, 100]} for name in names} for hits in (0, 4))
    (rose,) = differences(before, now)
    assert rose.startswith("all honest workers before v: false positives rose from 0 of 400")


def test_one_verifier_of_many_that_loses_an_eighth_turns_the_suite_red() -> None:
    before = {f"attack-{i}": {f"v{j}": [100, 100] for j in range(16)} for i in range(46)}
    now = {**before, "attack-7": {**before["attack-7"], "v3": [87, 100]}}
    (fell,) = differences(before, now)
    assert fell.startswith("attack-7 before v3: detection fell from 100 of 100")


def test_a_weakened_verifier_turns_the_suite_red_with_a_line_that_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = (Part(setting="tiny", sequences=16, behaviours=("honest", "early-exit")),)
    baseline = tmp_path / "detection.json"
    assert accept(tmp_path, baseline=baseline, suite=suite) == 0
    assert regress(tmp_path, baseline, suite) == 0
    assert "no rate is worse than the baseline" in capsys.readouterr().out
    lenient = toploc("strict", Thresholds(exponent_mismatches=128, mantissa_mean=128, mantissa_median=128))
    monkeypatch.setitem(VERIFIERS, "toploc-strict", replace(VERIFIERS["toploc-strict"], check=lenient))
    assert regress(tmp_path, baseline, suite) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("REGRESSION")]
    assert line.startswith("REGRESSION tiny: early-exit before toploc-strict: detection fell from 16 of 16"), line


def test_the_committed_baseline_fits_the_tables() -> None:
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    assert {part.setting: set(part.behaviours) for part in SUITE}["tiny"] == set(baseline["tiny"]) >= set(ATTACKS)
    for verifiers in baseline["tiny"].values():
        assert set(verifiers) == {*VERIFIERS, *POLICIES}


# ---------------------------------------------------------------------------------------------------------- noise
def test_a_model_cut_over_devices_is_the_same_function(bench: Bench) -> None:
    decoder = bench.shop.decoder("float32")
    tokens_BT = torch.arange(26).reshape(2, 13) % 14 + 2
    with torch.no_grad():
        whole, cut = decoder(tokens_BT), tensor_parallel(decoder, 2)(tokens_BT)
    assert torch.allclose(whole, cut, atol=1e-4) and not torch.equal(whole, cut)
    with pytest.raises(ValueError, match="not over 3 devices"):
        tensor_parallel(decoder, 3)


def test_the_atlas_finds_no_noise_where_there_is_none(bench: Bench) -> None:
    lines = {line.prover: line for line in atlas(bench, COUNT)}
    same = lines["prefill, bfloat16, sdpa, a batch"]
    assert (same.mismatches, same.margin, same.match_rate) == ((0, 0, 0), (0, 0, 0), 1.0)
    other = lines["prefill, float32, sdpa, a batch"]
    assert other.sequence[0] > 0 and other.projection[0] > 0 and other.match_rate > 0.9


def test_without_a_gpu_the_check_is_skipped_with_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = Path(__file__).parents[1] / "experiments" / "gpu" / "check.sh"
    run = subprocess.run([script], capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable})
    assert run.returncode == 0 and run.stdout.startswith("skipped: torch sees no CUDA")
