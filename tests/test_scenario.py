"""A bad scenario is refused in one clear sentence, before anything runs."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refimpl.toploc.check import PRESETS
from sim.__main__ import main
from sim.fabric import random_lives
from sim.kinds.swarm import BOUNDS
from sim.run import run_scenario
from sim.scenario import (
    OPTIONAL_PARTS,
    Scenario,
    ScenarioError,
    check_raw,
    known_scenarios,
    load_scenario,
    read_raw,
    read_scenario,
    scenario_path,
)
from tests.paths import TINY_MODEL

GOOD = """
title = "t"
shows = "s"
duration_s = 100.0
[model]
path = "tests/data/tiny-model"
[[nodes]]
name = "ledger"
role = "ledger"
device = "RTX 4090"
uplink_mbit_s = 100.0
downlink_mbit_s = 100.0
[[nodes]]
name = "orchestrator"
role = "orchestrator"
device = "RTX 4090"
uplink_mbit_s = 100.0
downlink_mbit_s = 100.0
[[nodes]]
name = "validator"
role = "validator"
device = "RTX 4090"
uplink_mbit_s = 100.0
downlink_mbit_s = 100.0
[[nodes]]
name = "worker"
count = 12
role = "worker"
device = "RTX 4090"
uplink_mbit_s = 100.0
downlink_mbit_s = 100.0
"""


CALIBRATED = 'calibrated = { size = "QwQ-32B", answer_tokens_median = 100.0 }'
PARETO = "jitter = {{ kind = 'pareto', parameters = [{}] }}\n[model]"
FAULT = """[[faults]]
kind = "{}"
start_s = {}
end_s = {}
nodes = ["{}"]
[model]"""
CUT = """[[network.sites]]
name = "lab"
uplink_mbit_s = 10.0
downlink_mbit_s = 10.0
[[faults]]
kind = "link"
start_s = 5.0
working = false
{}
[model]"""
LIFE_OF_NOBODY = """[[nodes]]
name = "ghost"
role = "worker"
device = "RTX 4090"
uplink_mbit_s = 1.0
downlink_mbit_s = 1.0
life = { session = { kind = "exponential" } }
[model]"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read_scenario(write(tmp_path, text))
    return str(caught.value)


def test_the_good_one_is_read_and_its_members_have_names_of_one_width(tmp_path: Path) -> None:
    scenario = read_scenario(write(tmp_path, GOOD))
    names = [member.name for member in scenario.members()]
    assert names[:3] == ["ledger", "orchestrator", "validator"]
    assert (names[3], names[-1], len(names)) == ("worker-00", "worker-11", 15)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("duration_s = 100.0", "duration_s = -1.0", ["bad.toml", "duration_s", "-1.0", "greater than 0"]),
        (
            "duration_s = 100.0",
            "duration = 100.0",
            ["bad.toml", "duration = 100.0 is no field here; did you mean duration_s"],
        ),
        ("duration_s = 100.0", "", ["bad.toml: duration_s is missing, and required"]),
        (
            'title = "t"',
            'title = "t"\ncolour = "red"',
            ["bad.toml: colour = 'red' is no field here; expected some of title, "],
        ),
        ("[model]", "[task]\nbatsch = 3\n[model]", ["bad.toml: task batsch = 3 is no field here; did you mean batch?"]),
        ("count = 12", "count = 0", ["'worker'", "count", "is 0"]),
        ("count = 12", 'count = "12 nodes"', ["'worker'", "count", "'12 nodes'", "integer"]),
        (
            "uplink_mbit_s = 100.0",
            "uplink_mbps = 100.0",
            ["'ledger' uplink_mbps = 100.0 is no", "mean uplink_mbit_s, which"],
        ),
        (
            "uplink_mbit_s",
            "uplink_gbit_s",
            ["'ledger' uplink_gbit_s = 100.0 is no", "mean uplink_mbit_s, which is missing?"],
        ),
        ("uplink_mbit_s = 100.0", "uplink_mbit_s = 0.0", ["'ledger'", "uplink_mbit_s", "0.0", "greater than 0"]),
        ('device = "RTX 4090"', 'device = "RTX 4900"', ["ledger", "'RTX 4900'", "Did you mean 'RTX 4090'"]),
        ('role = "worker"', 'role = "boss"', ["'worker'", "role", "'boss'"]),
        ('name = "worker"', 'name = "ledger"', ["two groups of nodes are called 'ledger'"]),
        ('name = "worker"', 'name = "../worker"', ["name", "'../worker'"]),
        ('role = "validator"', 'role = "worker"', ["0 nodes have the role validator; expected exactly 1"]),
        ('role = "worker"', 'role = "validator"', ["13 nodes have the role validator; expected exactly 1"]),
        ("count = 12", 'behaviour = "weights-4bits"', ["'weights-4bits'", "Did you mean 'weights-4bit'"]),
        ('role = "ledger"', 'role = "ledger"\nbehaviour = "kv-8bit"', ["only workers can cheat"]),
        ("[model]", '[network]\nregions = "moon"\n[model]', ["'moon'"]),
        ("[model]", '[network]\nregions = "aws"\n[model]', ["ledger has no region"]),
        ("count = 12", 'region = "Oregon"', ["worker is in region 'Oregon', but network.regions names no set"]),
        ('title = "t"', 'title = "t', ["bad.toml", "not valid TOML"]),
        # disconnected
        ('role = "validator"', 'role = "validator"\nnat = "nat"', ["validator", "behind a NAT without a relay"]),
        ("count = 12", 'nat = "relay_only"', ["worker is relay_only and names no relay"]),
        ("count = 12", 'nat = "nat"\nrelay = "moon"', ["relay 'moon'", "an open node"]),
        ("count = 12", 'sites = ["campus"]', ["worker is in site 'campus'"]),
        # impossible memory
        ('path = "tests/data/tiny-model"', CALIBRATED, ["needs", "GB", "RTX 4090"]),
        ("[model]", "[model]\ndtype = 8", ["dtype", "8"]),
        ('path = "tests/data/tiny-model"', "", ["neither or both of path and calibrated"]),
        ('path = "tests/data/tiny-model"', CALIBRATED.replace("QwQ-32B", "QwQ"), ["'QwQ'", "known: "]),
        (
            'path = "tests/data/tiny-model"',
            CALIBRATED.replace("QwQ-32B", "SmolLM2-135M").replace(" }", ', table = "nosuch" }'),
            ["bad.toml: model.calibrated.table is 'nosuch'; known: smollm2"],
        ),
        # what would be passed over
        (
            "[model]",
            FAULT.format("crash", 5.0, 6.0, "worker").replace("[model]", "slowness = 5.0\ndirection = 'up'\n[model]"),
            ["faults 0: a fault of kind 'crash' does not use slowness, direction; expected nodes, disk_kept, "],
        ),
        ("count = 12", 'relay = "ledger"', ["worker names the relay 'ledger' and is open"]),
        ("count = 12", 'sources = ["ledger"]', ["worker fetches from 'ledger'; no origin or relay"]),
        # faults
        ("[model]", FAULT.format("hang", 50.0, 40.0, "worker"), ["end_s is 40.0", "after start_s, 50.0"]),
        ("[model]", FAULT.format("hang", 500.0, 600.0, "worker"), ["starts at 500.0 s", "ends at 100.0 s"]),
        ("[model]", FAULT.format("hang", 5.0, 6.0, "nobody"), ["strikes 'nobody'"]),
        ("[model]", FAULT.format("melt", 5.0, 6.0, "worker"), ["kind", "'melt'"]),
        ("[model]", FAULT.format("slow", 5.0, 6.0, "worker"), ["needs slowness"]),
        ("[model]", FAULT.format("link", 5.0, 6.0, "worker"), ["changes nothing"]),
        ("[model]", CUT.format('sites = ["campus"]'), ["fault 0 is on site 'campus'; network.sites has lab"]),
        ("[model]", CUT.format('regions = ["japan"]'), ["the trunk of region 'japan'; network.trunks has none"]),
        ("[model]", CUT.format(""), ["kind 'link' is on nothing; expected exactly one of nodes, sites, regions"]),
        ("[model]", CUT.format('nodes = ["worker"]\nsites = ["lab"]'), ["kind 'link' is on nodes and sites; expected"]),
        (
            "[model]",
            CUT.replace('"link"', '"hang"').format('sites = ["lab"]\nnodes = ["worker"]'),
            ["use sites, working; expected nodes"],
        ),
        ("[model]", LIFE_OF_NOBODY, ["exponential", "mean_s"]),
        (
            "[model]",
            "[network]\njitter_ms = 1.0\njitter = {kind = 'pareto', parameters = [0.1, 2.0]}\n[model]",
            ["one of them"],
        ),
        ("[model]", "[network]\n" + PARETO.format("0.1"), ["pareto", "shape"]),
    ],
)
def test_each_kind_of_fault_is_named_with_its_value_and_what_was_expected(
    tmp_path: Path, old: str, new: str, expected: list[str]
) -> None:
    assert old in GOOD
    sentence = refusal(tmp_path, GOOD.replace(old, new, 1))
    for part in expected:
        assert part in sentence, sentence
    assert "\n" not in sentence and "Value error" not in sentence and "Extra inputs" not in sentence


def test_a_scenario_in_which_nothing_would_happen_says_so(tmp_path: Path) -> None:
    raw = tomllib.loads(GOOD)
    raw = copy.deepcopy(raw)
    raw["nodes"] = raw["nodes"][:3]
    with pytest.raises(ValueError, match="nothing would ever happen"):
        Scenario.model_validate(raw)


def test_an_unknown_scenario_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario("adversarail")
    assert "Did you mean 'adversarial'" in str(caught.value)
    assert all(name in str(caught.value) for name in known_scenarios())
    assert main(["run", "nothing-like-it"]) == 2
    assert "Known: adversarial, adversarial-tiny" in capsys.readouterr().err


@pytest.mark.parametrize("name", known_scenarios())
def test_shipped_scenarios_are_good_and_say_what_they_show(name: str) -> None:
    assert len(load_scenario(name).shows) > 20


def test_thresholds_are_the_checkers_own() -> None:
    assert {
        name: (preset.exponent_mismatches, preset.mantissa_mean, preset.mantissa_median)
        for name, preset in PRESETS.items()
    } == BOUNDS


def test_a_trace_file_says_when_nodes_come_and_go_and_is_checked(tmp_path: Path) -> None:
    trace = tmp_path / "lives.csv"
    head = "time_s,node,event,disk_kept\n"
    trace.write_text(head + "10.5,worker-03,join,no\n20.0,worker-03,leave,yes\n", encoding="utf-8")
    scenario = read_scenario(write(tmp_path, f'life_trace = "{trace}"\n' + GOOD))
    assert [(e.time_ns, e.node, e.kind) for e in random_lives(scenario, 1)] == [
        (10_500_000_000, "worker-03", "join"), (20_000_000_000, "worker-03", "leave"),
    ]  # fmt: skip
    trace.write_text(head + "1.0,nobody,join,no\n", encoding="utf-8")
    assert "no node is called so" in refusal(tmp_path, f'life_trace = "{trace}"\n' + GOOD)
    assert "cannot be read" in refusal(tmp_path, 'life_trace = "nowhere.csv"\n' + GOOD)


def test_a_real_model_that_does_not_fit_a_device_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """69.5e9 weights of two bytes are 139 GB, an RTX 4090 has 24; the checkpoint's own config.json says so."""
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((TINY_MODEL / "config.json").read_text(encoding="utf-8"))
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    large |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    (model / "config.json").write_text(json.dumps({**config, **large}), encoding="utf-8")
    scenario = read_scenario(write(tmp_path, GOOD))
    with pytest.raises(ScenarioError, match=r"validator needs 139\.02 GB .*RTX 4090 has 24\.00 GB"):
        run_scenario(scenario, name="t", seed=1, model_path=str(model), runs=tmp_path / "runs", progress=False)
    assert not (tmp_path / "runs").exists()
    scenario.require_memory(str(TINY_MODEL))
    with pytest.raises(ScenarioError, match="does not exist"):
        scenario.require_memory(str(tmp_path / "nothing"))


def test_a_role_of_another_kind_of_run_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, GOOD.replace('role = "worker"', 'role = "client"'))
    assert "'worker' has the role 'client'; a swarm has ledger, orchestrator, validator, worker" in sentence
    both = refusal(tmp_path, GOOD.replace("[model]", "[broadcast]\nsize_gb = 1.0\n[model]"))
    expected = "expected [model] for a swarm, [broadcast] for a broadcast, [pipeline] for a pipeline"
    assert f"the scenario has [model], [broadcast]; {expected}" in both


# ------------------------------------------------------------------------------------------------------ a broadcast's
def broadcast_with(change: Callable[[dict[str, Any]], None]) -> str:
    """Why the shipped broadcast is refused after `change`."""
    raw = read_raw(scenario_path("broadcast"))
    change(raw)
    with pytest.raises(ScenarioError) as caught:
        check_raw(raw, "b.toml")
    return str(caught.value)


def test_sources_in_a_circle_are_refused_by_the_group_that_the_origin_never_reaches() -> None:
    def circle(raw: dict[str, Any]) -> None:
        by_name = {group["name"]: group for group in raw["nodes"]}
        by_name["relay-oregon"]["sources"] = ["relay-tokyo"]
        by_name["relay-tokyo"]["sources"] = ["relay-oregon"]

    def opened(raw: dict[str, Any]) -> None:
        circle(raw)
        origin = next(group["name"] for group in raw["nodes"] if group["role"] == "origin")
        next(group for group in raw["nodes"] if group["name"] == "relay-tokyo")["sources"].append(origin)

    assert broadcast_with(circle).startswith(
        "b.toml: the origin never reaches relay-oregon, which fetches from relay-tokyo: sources must lead back to "
    )
    raw = read_raw(scenario_path("broadcast"))
    opened(raw)
    assert check_raw(raw, "b.toml").kind == "broadcast"  # tokyo has it from the origin, and oregon from tokyo


@pytest.mark.parametrize("part", OPTIONAL_PARTS)
def test_parts_that_a_broadcast_does_not_use_are_refused(part: str) -> None:
    sentence = broadcast_with(lambda raw: raw.update({part: {}}))
    assert sentence == f"b.toml: the scenario has [{part}], which a broadcast does not use"


def test_an_origin_has_no_sources() -> None:
    def change(raw: dict[str, Any]) -> None:
        next(group for group in raw["nodes"] if group["role"] == "origin")["sources"] = ["relay-tokyo"]

    assert "has sources, which only relays and clients use; its role is origin" in broadcast_with(change)


def test_one_fault_in_many_groups_is_one_sentence() -> None:
    raw = read_raw(scenario_path("broadcast"))
    for group in raw["nodes"][1:4]:
        group["latency_ms"] = -1.0
    with pytest.raises(ScenarioError) as caught:
        check_raw(raw, "b.toml")
    names = "'relay-oregon', 'relay-virginia', 'relay-frankfurt'"
    assert str(caught.value) == f"b.toml: nodes {names} latency_ms is -1.0: Input should be greater than or equal to 0"


@pytest.mark.parametrize("name", known_scenarios())
def test_a_scenario_can_be_written_down_and_read_again(name: str) -> None:
    """A replay and the processes of a real run read it from JSON; what has defaults must not count as written."""
    scenario = load_scenario(name)
    assert check_raw(json.loads(json.dumps(scenario.as_plain())), name) == scenario
