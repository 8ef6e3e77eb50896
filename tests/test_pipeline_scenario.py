"""`make sim SCENARIO=pipeline`: rings over named devices, judged by checkers that stand outside."""

import json
from types import SimpleNamespace

import pytest

from refimpl.attacks.names import RING_BEHAVIOURS
from refimpl.attacks.ring import RING_CHEATS
from sim.kinds.pipeline_checks import PipelineFacts, no_ring_beats_its_bound, nobody_innocent_is_blamed
from sim.run import run_scenario
from sim.scenario import ScenarioError, read_scenario

HEAD = """
title = "t"
shows = "a ring whose middle stage cheats, and an honest one that waits on its links"
duration_s = 600.0
[pipeline]
rounds = 2
"""


def ring(name, sequences, micro_batches, latency_ms, behaviours, spares=1):
    text = f"""
[[pipeline.rings]]
name = "{name}"
size = "QwQ-32B"
sequences = {sequences}
rows = 2
micro_batches = {micro_batches}
prompt_tokens = 24
answer_tokens = 16
"""
    nodes = [(f"{name}-s{at}", "stage", behaviour) for at, behaviour in enumerate(behaviours)]
    nodes += [(f"{name}-x{at}", "spare", "honest") for at in range(spares)] + [(f"{name}-c", "client", "honest")]
    return text, "".join(
        f"""
[[nodes]]
name = "{node}"
ring = "{name}"
role = "{role}"
behaviour = "{behaviour}"
device = "H100 SXM"
uplink_mbit_s = 1000.0
downlink_mbit_s = 1000.0
latency_ms = {latency_ms}
"""
        for node, role, behaviour in nodes
    )


def played(tmp_path, *rings):
    file = tmp_path / "rings.toml"
    file.write_text(HEAD + "".join(r[0] for r in rings) + "".join(r[1] for r in rings))
    scenario = read_scenario(file)
    return run_scenario(
        scenario, name="rings", seed=3, model_path="", runs=tmp_path, say=lambda text: None, progress=False
    )


def test_guilty_stages_are_blamed_and_rings_reach_their_bound(tmp_path):
    """Blamed by replay (its answers are rejected, the next round's are not), by a complaint, and for a false one; the
    ring that waits on its links comes within 5 % of M m / max(M tau, sum of tau + lambda)."""
    honest = ring("far", 8, 2, 20.0, ["honest"] * 3)
    skips = ring("skips", 4, 2, 1.0, ["honest", "layer-skipped", "honest"])
    tampers = ring("tampers", 4, 1, 1.0, ["honest", "tampered-send", "honest"])
    accuses = ring("accuses", 4, 1, 1.0, ["honest", "complaint-forged", "honest"])
    result = played(tmp_path, honest, skips, tampers, accuses)
    assert result.ok, (result.ended, result.violations)
    rings = {row["ring"]: row for row in result.figures["rings"]}
    assert result.figures["guilty_blamed"] == ["accuses-s1", "skips-s1", "tampers-s1"]
    assert not result.figures["innocent_blamed"]
    assert rings["skips"]["answers"] == {"accepted": 4, "rejected": 4, "undecided": 0}
    assert rings["tampers"]["answers"]["accepted"] == rings["accuses"]["answers"]["accepted"] == 8
    assert rings["skips"]["stages"] == ["skips-s0", "skips-x0", "skips-s2"]
    assert 0.95 < rings["far"]["share_of_bound"] < 1.05 and rings["far"]["hop_ms"][0] > 40
    assert (result.folder / "rings.png").stat().st_size > 10_000
    assert json.loads((result.folder / "summary.json").read_text())["kind"] == "pipeline"


def test_checkers_can_fail():
    """Each says so when its promise is broken."""

    facts = PipelineFacts(blamed=[("r", "b")], convicted=["key of a"], speeds={"r": [(90.0, 80.0)]})
    keys = {"a": "key of a", "b": "key of b"}
    view = SimpleNamespace(guilty={"a"}, facts=facts, keys=lambda: keys)
    assert list(nobody_innocent_is_blamed(view)) == ["b is blamed, and is honest"]
    assert "90.0 tokens/s in round 0; its bound is 80.0" in next(no_ring_beats_its_bound(view))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('size = "QwQ-32B"', 'size = "QwQ"', "known: SmolLM2-135M"),
        ('behaviour = "honest"\ndevice', 'behaviour = "kv-8bit"\ndevice', "not known"),
        ('ring = "far"\nrole = "client"', 'ring = "near"\nrole = "client"', "pipeline.rings has far"),
        ('role = "client"', 'role = "spare"', "expected at least one stage, and one client"),
        ('device = "H100 SXM"', 'device = "RTX 4090"', "no cut fits: layers 0..19 fit"),
    ],
)
def test_a_bad_ring_is_refused_in_one_sentence(tmp_path, old, new, says):
    text = HEAD + "".join(ring("far", 8, 2, 20.0, ["honest"]))
    assert old in text
    file = tmp_path / "rings.toml"
    file.write_text(text.replace(old, new))
    with pytest.raises(ScenarioError, match=says):
        run_scenario(
            read_scenario(file), name="bad", seed=1, model_path="", runs=tmp_path, say=lambda text: None, progress=False
        )


def test_simulated_cheats_are_real_ones():
    assert set(RING_BEHAVIOURS) <= set(RING_CHEATS)
