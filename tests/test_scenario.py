"""A bad scenario is refused in one clear sentence, before anything runs."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path

import pytest

from refimpl.toploc.check import PRESETS
from sim.__main__ import main
from sim.run import BOUNDS
from sim.scenario import Scenario, ScenarioError, known_scenarios, load_scenario, read_scenario

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
        ("duration_s = 100.0", "duration = 100.0", ["bad.toml", "duration_s", "required"]),
        ('title = "t"', 'title = "t"\ncolour = "red"', ["bad.toml", "colour", "'red'"]),
        ("count = 12", "count = 0", ["'worker'", "count", "is 0"]),
        ("count = 12", 'count = "12 nodes"', ["'worker'", "count", "'12 nodes'", "integer"]),
        ("uplink_mbit_s = 100.0", "uplink_mbps = 100.0", ["'ledger'", "uplink_mbps"]),
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
    ],
)
def test_each_kind_of_fault_is_named_with_its_value_and_what_was_expected(
    tmp_path: Path, old: str, new: str, expected: list[str]
) -> None:
    assert old in GOOD
    sentence = refusal(tmp_path, GOOD.replace(old, new, 1))
    for part in expected:
        assert part in sentence, sentence


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
    assert {name: (preset.exponent_mismatches, preset.mantissa_mean) for name, preset in PRESETS.items()} == BOUNDS
