"""Puts a scenario's nodes on its network: what every kind of run begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.carrier import FlowCarrier
from sim.churn import ChurnEvent, churn_events
from sim.hardware import find_device
from sim.jitter import NO_JITTER, Jitter
from sim.network import Network
from sim.record import EventLog
from sim.regions import region_set
from sim.scenario import Member, Scenario
from sim.transport import FAIR, LV08, TCP
from sim.world import SimFabric, SimWorld

TRANSPORTS = {"fair": FAIR, "tcp": TCP, "lv08": LV08}


def journal_for(world: SimWorld) -> Callable[..., None]:
    """The node's journal: the fabric's log with the node's name."""

    def journal(kind: str, /, **fields: Any) -> None:
        world.fabric.record(kind, world.name, **fields)

    return journal


def members_by_name(scenario: Scenario) -> list[Member]:
    """All nodes. Things that happen at one instant happen in this order."""
    return sorted(scenario.members(), key=lambda member: member.name)


def build_network(scenario: Scenario) -> Network:
    """The scenario's places, lines and nodes, numbered in the order of their names, whatever the file's."""
    borders = any(fault.kind == "partition" for fault in scenario.faults)
    links = scenario.network
    network = Network(
        regions=links.regions,
        jitter_ms=links.jitter_ms,
        jitter=NO_JITTER if links.jitter is None else Jitter(links.jitter.kind, links.jitter.parameters),
        transport=TRANSPORTS[links.transport],
        hole_punching=links.hole_punching,
        single_flow_bound=links.single_flow_bound,
        borders=borders,
    )
    for site in links.sites:
        network.add_site(site.name, uplink_mbit_s=site.uplink_mbit_s, downlink_mbit_s=site.downlink_mbit_s)
    for trunk in links.trunks:
        network.add_trunk(trunk.region, out_mbit_s=trunk.out_mbit_s, in_mbit_s=trunk.in_mbit_s)
    place_of = {member.name: place for place, member in enumerate(members_by_name(scenario))}
    for member in members_by_name(scenario):
        group = member.group
        network.add_node(
            name=member.name,
            region=group.region,
            uplink_mbit_s=group.uplink_mbit_s,
            downlink_mbit_s=group.downlink_mbit_s,
            latency_ms=group.latency_ms,
            loss_fraction=group.loss_fraction,
            nat=group.nat,
            relay=place_of[group.relay] if group.relay is not None else None,
            sites=group.sites,
        )
    return network


def build(scenario: Scenario, seed: int, log: EventLog) -> tuple[SimFabric, Network]:
    """The scenario's nodes on its network, none of them up yet."""
    network = build_network(scenario)
    fabric = SimFabric(
        run_seed=seed,
        carrier=lambda kernel: FlowCarrier(kernel, network, seed),
        recorder=log,
    )
    for member in members_by_name(scenario):
        fabric.node(member.name, find_device(member.group.device).price)
    return fabric, network


def random_lives(scenario: Scenario, seed: int) -> list[ChurnEvent]:
    """All comings and goings of all groups, in the order of time and name."""
    regions = region_set(scenario.network.regions) if scenario.network.regions is not None else None
    events = scenario.traced_lives()
    for group in scenario.nodes:
        if group.life is not None:
            region = group.region or ""
            nodes = {member.name: region for member in scenario.members() if member.group is group}
            offsets = {region: regions.utc_offset_h(region)} if regions is not None else None
            events += churn_events(group.life, nodes, seed, scenario.duration_s, offsets)
    return sorted(events, key=lambda event: (event.time_ns, event.node))
