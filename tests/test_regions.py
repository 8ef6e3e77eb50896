"""Region tables and access lines: values as published, symmetry, refusals, and draws against their percentiles."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from sim.catalogue import CatalogueError, read_toml
from sim.regions import REGIONS_PATH, Quantiles, UnknownRegion, access_mix, check_regions, region_set


def test_aws_pairs_as_published_in_both_directions() -> None:
    aws = region_set("aws")
    assert len(aws.names) == 10
    # rows of the published triangle, from both ends
    for a, b, rtt, gbit in [
        ("oregon", "virginia", 67, 0.79),
        ("virginia", "sydney", 197, 0.38),
        ("frankfurt", "singapore", 155, 0.54),
        ("ireland", "frankfurt", 24, 1.08),
        ("london", "ireland", 12, 1.09),
    ]:
        assert aws.rtt_ms(a, b) == aws.rtt_ms(b, a) == rtt
        assert aws.single_flow_gbit_s(a, b) == aws.single_flow_gbit_s(b, a) == gbit
    assert aws.rtt_ms("tokyo", "tokyo") == 1.0
    assert aws.single_flow_gbit_s("tokyo", "tokyo") is None


def test_p2p_pairs_shares_and_lines_as_published() -> None:
    p2p = region_set("p2p")
    assert p2p.rtt_ms("europe", "australia") == p2p.rtt_ms("australia", "europe") == 294
    assert p2p.rtt_ms("south-america", "south-america") == 88
    assert p2p.single_flow_gbit_s("europe", "japan") is None
    assert p2p.mean_access_mbit_s("south-america") == (18, 5.8)
    assert sum(p2p.node_share().values()) == pytest.approx(1.0, abs=1e-12)
    assert p2p.node_share()["europe"] == pytest.approx(0.5, abs=1e-3)


def test_nodes_are_spread_by_share() -> None:
    p2p, count = region_set("p2p"), 20_000
    drawn = p2p.sample(count, np.random.default_rng(5))
    for region, share in p2p.node_share().items():
        error = np.sqrt(share * (1 - share) / count)
        assert abs(drawn.count(region) / count - share) < 4 * error


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UnknownRegion, match=r"region set 'aw' is not known\. Did you mean 'aws'\? Known: aws, p2p"):
        region_set("aw")
    with pytest.raises(UnknownRegion, match=r"region 'frankfort' is not in set 'aws'\. Did you mean 'frankfurt'"):
        region_set("aws").rtt_ms("frankfort", "tokyo")
    with pytest.raises(UnknownRegion, match="access mix 'home'"):
        access_mix("home")


def broken(change: Any) -> str:
    raw = copy.deepcopy(read_toml(REGIONS_PATH))
    change(raw)
    with pytest.raises(CatalogueError) as caught:
        check_regions(raw, "mine.toml")
    return str(caught.value)


def test_bad_tables_are_refused() -> None:
    assert "rtt_ms has rows of" in broken(lambda raw: raw["set"]["aws"]["rtt_ms"].pop())
    assert "0 or below" in broken(lambda raw: raw["set"]["p2p"]["rtt_ms"][0].__setitem__(0, -3))
    assert "node_share sums to 0.96" in broken(lambda raw: raw["set"]["p2p"]["node_share"].__setitem__(0, 0.291))
    wrong = broken(lambda raw: raw["set"]["aws"].update(latency_ms=[[1]]))
    assert "aws latency_ms = [[1]] is no field here; did you mean rtt_ms?" in wrong
    assert "sum to 1.1" in broken(lambda raw: raw["access"]["consumer"]["kind"][0].update(share=0.7))
    assert "needs ratio" in broken(lambda raw: raw["access"]["consumer"]["kind"][0]["uplink"].pop("ratio"))


def test_consumer_lines_have_the_stated_percentiles() -> None:
    rng, count = np.random.default_rng(7), 8000
    lines = [access_mix("consumer").sample(rng) for _ in range(count)]
    down = np.array([line.downlink_mbit_s for line in lines])
    for probability, value in [(0.10, 20), (0.25, 45), (0.50, 100), (0.75, 300), (0.90, 700)]:
        error = np.sqrt(probability * (1 - probability) / count)
        assert abs(np.mean(down <= value) - probability) < 4 * error
    assert down.min() >= 2 and down.max() <= 2000


def test_consumer_uplinks_follow_their_kind() -> None:
    rng, count = np.random.default_rng(9), 4000
    lines = [access_mix("consumer").sample(rng) for _ in range(count)]
    for kind, share in [("cable", 0.6), ("fibre", 0.3), ("dsl-or-mobile", 0.1)]:
        mine = [line for line in lines if line.kind == kind]
        assert abs(len(mine) / count - share) < 4 * np.sqrt(share * (1 - share) / count)
        for line in mine:
            assert line.uplink_mbit_s <= line.downlink_mbit_s and 0.001 <= line.loss_fraction <= 0.01
            if kind == "cable":
                assert line.uplink_mbit_s == pytest.approx(min(40, line.downlink_mbit_s / 10))
            elif kind == "fibre":
                assert line.uplink_mbit_s == line.downlink_mbit_s
            else:
                assert line.uplink_mbit_s <= 10 and 30 <= line.last_mile_rtt_ms <= 60


def test_draws_depend_on_the_generator_alone() -> None:
    mix = access_mix("consumer")
    assert mix.sample(np.random.default_rng(3)) == mix.sample(np.random.default_rng(3))


def test_constant_lines() -> None:
    line = access_mix("datacenter").sample(np.random.default_rng(1))
    assert (line.downlink_mbit_s, line.uplink_mbit_s) == (10_000, 10_000)
    assert Quantiles(p50=5, low=5, high=5).at(0.9) == pytest.approx(5)
