"""The tables that a scenario file may have, each checked by itself; how they hang together is `sim/scenario.py`'s.

Every field that has a unit ends in it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sim.catalogue import Strict
from sim.churn import ChurnSpec
from sim.jitter import Jitter


class CalibratedPart(Strict):
    """Instead of a real model: a size that prices the work, and measured scores that decide verdicts."""

    size: str = Field(description="a name in sim/model_sizes.py")
    table: str = Field("smollm2", description="a file in sim/tables")
    answer_tokens_median: float = Field(gt=0)
    answer_tokens_sigma: float = Field(0.8, ge=0, le=3, description="of the log-normal of answer lengths")


class ModelPart(Strict):
    """The model that everybody is to run: a real one, or its calibrated stand-in."""

    path: str | None = Field(None, description="a folder or hub id; SmolLM2-135M-Instruct is made when missing")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    calibrated: CalibratedPart | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> ModelPart:
        if (self.path is None) == (self.calibrated is None):
            raise ValueError("model names neither or both of path and calibrated; expected exactly one")
        if self.calibrated is not None and "dtype" in self.model_fields_set:
            raise ValueError("model.dtype is of a real model; model.calibrated does not use it")
        return self


class TaskPart(Strict):
    """What is asked, and how answers are sampled."""

    prompts: Literal["instructions", "toy"] = "instructions"
    batch: int = Field(8, ge=1, le=1024, description="problems per assignment")
    assignments: int = Field(1, ge=1, description="per worker")
    pause_s: float = Field(0.0, ge=0, description="mean of an exponential rest between a worker's assignments")
    heartbeat_s: float = Field(10.0, gt=0)
    answer_tokens_max: int = Field(64, ge=1, le=32768)
    temperature: float = Field(0.8, ge=0, le=10)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)


class VerifierPart(Strict):
    """How proofs are judged."""

    mode: Literal["strict", "published"] = "strict"
    thresholds: Literal["paper", "deployed"] = "paper"
    margin_max: float | None = Field(
        None, ge=0, description="mean clipped margin of tokens under their seed, logits; left out: not looked at"
    )
    end_probability_min: float | None = Field(
        None, ge=0, lt=1, description="of the token that ends an answer early; left out: endings are not looked at"
    )
    batch: int = Field(8, ge=1, le=256, description="submissions replayed together")


class LedgerPart(Strict):
    """What honesty earns and cheating costs; see `refimpl.testnet.ledger.LedgerRules`."""

    stake: float = Field(1000.0, ge=0, description="tokens that each worker puts down")
    stake_minimum: float = Field(500.0, ge=0)
    reward_per_unit: float = Field(0.01, ge=0)
    penalty: float = Field(200.0, ge=0)
    rejections_to_eject: int = Field(1, ge=1)


class JitterPart(Strict):
    """A random delay on top of each message's latency, by a named law; see `sim/jitter.py` for their parameters."""

    kind: Literal["uniform", "normal", "lognormal", "pareto", "exponential", "latency_factor"]
    parameters: tuple[float, ...]

    @model_validator(mode="after")
    def _makes_sense(self) -> JitterPart:
        Jitter(self.kind, self.parameters)  # says what is wrong
        return self


class TrunkPart(Strict):
    """What everything that leaves and enters a region shares."""

    region: str
    out_mbit_s: float = Field(gt=0)
    in_mbit_s: float = Field(gt=0)


class SitePart(Strict):
    """A line that the nodes of a place share: a campus, a data centre, a NAT box."""

    name: str = Field(min_length=1)
    uplink_mbit_s: float = Field(gt=0)
    downlink_mbit_s: float = Field(gt=0)


class NetworkPart(Strict):
    """How far apart regions are, and what lies between nodes beside their own lines."""

    regions: str | None = Field(None, description="a named set of region distances")
    jitter_ms: float = Field(0.0, ge=0, description="mean of an exponential delay on top of each message's latency")
    jitter: JitterPart | None = Field(None, description="another law instead of jitter_ms")
    transport: Literal["fair", "tcp", "lv08"] = Field(
        "fair", description="tcp: header overhead and window; lv08: SimGrid's TCP model (shares by round trip, factors)"
    )
    hole_punching: bool = Field(False, description="nodes behind NATs reach each other without a relay")
    single_flow_bound: bool = Field(False, description="no flow is faster than the region set's measured single flow")
    trunks: tuple[TrunkPart, ...] = ()
    sites: tuple[SitePart, ...] = ()

    @model_validator(mode="after")
    def _one_jitter(self) -> NetworkPart:
        if self.jitter is not None and self.jitter_ms:
            raise ValueError("network has both jitter and jitter_ms; expected one of them")
        sites, trunks = [site.name for site in self.sites], [trunk.region for trunk in self.trunks]
        for what, names in (("site", sites), ("trunk of region", trunks)):
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"network has two entries for {what} {name!r}; expected one")
        return self


class BroadcastPart(Strict):
    """Weights that go out from an origin over relays to clients (roles origin, relay, client)."""

    size_gb: float = Field(gt=0, le=100_000, description="of one version; decimal")
    shard_mb: float = Field(50.0, gt=0, le=1000)
    versions: int = Field(1, ge=1, le=1000)
    interval_s: float = Field(0.0, ge=0, description="between the publication of one version and the next")
    policy: Literal["published", "moving-average", "expected-finish"] = "expected-finish"
    connections: int = Field(10, ge=1, le=256, description="transfers at once, per client and relay")
    increment_share: float | None = Field(
        None, gt=0, lt=1, description="size of an increment between versions, of a version's; left out: none are made"
    )
    reparent_s: float | None = Field(
        None, gt=0, description="how often relays look for a better parent; left out: the tree stays as it is"
    )
    relay_slots: int = Field(8, ge=1, le=10_000, description="with reparent_s: relays that may hang below one")


class RingPart(Strict):
    """One ring; its nodes are the groups with `ring = NAME` (roles stage, spare, client), stages in file order."""

    name: str = Field(min_length=1)
    size: str = Field(description="a name in sim/model_sizes.py")
    sequences: int = Field(8, ge=1, le=4096, description="asked at once, in each round")
    prompt_tokens: int = Field(64, ge=1, le=32768)
    answer_tokens: int = Field(64, ge=2, le=32768)
    rows: int = Field(8, ge=1, le=1024, description="sequences of one micro-batch")
    micro_batches: int = Field(0, ge=0, le=256, description="0: as many as the planner finds worth it")


class PipelinePart(Strict):
    """Models cut over rings of devices (roles stage, spare, client); see sim/kinds/pipeline.py."""

    rounds: int = Field(1, ge=1, le=100, description="a client asks, checks, has the guilty removed, and asks again")
    rings: tuple[RingPart, ...] = Field(min_length=1)


class NodeGroup(Strict):
    """`count` nodes that are alike."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    count: int = Field(1, ge=1, le=1_000_000)
    role: str
    ring: str | None = Field(None, description="stage, spare, client: the ring it belongs to")
    sources: tuple[str, ...] = Field((), description="relay, client: groups to fetch from; left out: origin, relays")
    behaviour: str = "honest"
    device: str
    region: str | None = None
    uplink_mbit_s: float = Field(gt=0)
    downlink_mbit_s: float = Field(gt=0)
    latency_ms: float = Field(0.0, ge=0, description="one way, of the access line")
    loss_fraction: float = Field(0.0, ge=0, lt=1, description="of packets, on the access line")
    nat: Literal["open", "nat", "relay_only"] = "open"
    relay: str | None = Field(None, description="the open node through which others reach a node behind a NAT")
    sites: tuple[str, ...] = Field((), description="shared lines on the way out, nearest first")
    life: ChurnSpec | None = Field(None, description="when it comes and goes; left out: always there")
