"""The ring itself, as its head keeps it: who sits where, forming it, noticing that it hangs, mending it.

A stage is missed by its work, not by a heartbeat: when the oldest pass on its way is overdue (measured against recent
ones), every stage is asked for its counters, and the first place where they step down is named (`watch.py`). Who does
not answer, or does not move, loses its seat to a spare node, and the ring is formed again as a new epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from refimpl.identity import is_public_key
from refimpl.journal import Journal
from refimpl.messages import Message, Ok
from refimpl.pipeline.formation import Formation
from refimpl.pipeline.messages import (
    VERSION,
    Announce,
    AskProgress,
    GreetNeighbours,
    JoinRing,
    Member,
    ReportTrouble,
    RingPlan,
)
from refimpl.pipeline.watch import Blockage, Progress, find_blockage
from refimpl.world import CallError, Refused, Signal, World


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """What ring to form, and how long to wait for it."""

    ring: str  # unique to this run
    layers: int
    hidden: int
    dtype: str
    cuts: tuple[int, ...]  # where each stage's layers end; the last is `layers`
    micro_batches: int = 1
    rows: int = 8
    capacity_tokens: int = 2048
    prefill_tokens: int = 512  # of one row per pass
    signed: bool = False
    keep_evidence: bool = False
    chunk_tokens: int = 32
    top_k: int = 128
    temperature: float = 1.0
    sampling_top_k: int = 0
    top_p: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    join_timeout_s: float = 300.0
    probe_timeout_s: float = 2.0
    overdue_s_min: float = 3.0  # no pass counts as overdue before
    overdue_factor: float = 8.0  # a pass is overdue so many medians of its kind after that
    check_s: float = 0.5  # between looks at the clock
    spare_wait_s: float = 1.0  # between looks for a node, when none is left
    strangers: bool = False  # nodes that the head was not started with may announce themselves, each under its own key

    def __post_init__(self) -> None:
        if (
            not self.cuts
            or self.cuts[-1] != self.layers
            or sorted(set(self.cuts)) != list(self.cuts)
            or self.cuts[0] < 1
        ):
            raise ValueError(f"cuts are {self.cuts}, expected ascending, from 1 on, and ending at {self.layers}")


NODES_MAX = 1024
"""No strangers beyond so many nodes."""


class Ring:
    """The head's view of its ring. `stage` is the head's own; `nodes` maps names to public keys, in order of
    use. `epoch`: the last one used, by an earlier head too; `begin` writes down the next before it is used. `banned`:
    public keys of nodes that are out; a key is out under every name."""

    def __init__(
        self,
        world: World,
        config: RingConfig,
        stage: Any,
        nodes: Mapping[str, str],
        journal: Journal,
        epoch: int,
        begin: Callable[[int], None],
        banned: Set[str],
    ) -> None:
        if next(iter(nodes), None) != world.name:
            raise ValueError(f"the first node of a ring must be the head's own, {world.name!r}; got {list(nodes)[:1]}")
        if len(set(nodes.values())) != len(nodes):
            raise ValueError(f"two of the nodes {list(nodes)} have one public key, expected a key for each")
        self.world, self.config, self.stage, self.journal = world, config, stage, journal
        self._begin, self._banned = begin, banned
        self.nodes = dict(nodes)
        self.up = False
        self.epoch = epoch
        self.seats: list[str] = []  # node of each stage
        self.blockages: list[Blockage] = []
        self._suspects: set[str] = set()
        self._link_sender = ""  # of the link that hung last
        self._alarm: Signal = world.signal()

    @property
    def formation(self) -> Formation:
        """This epoch, as the head's own stage holds it."""
        formation = self.stage.formation
        assert isinstance(formation, Formation)
        return formation

    @property
    def banned(self) -> list[str]:
        """Names of the nodes that are out."""
        return sorted(name for name, key in self.nodes.items() if key in self._banned)

    def alarm(self) -> None:
        """Look now."""
        self._alarm.set()

    async def quiet(self, duration_s: float) -> bool:
        """Wait so long, or until an alarm. True: none came."""
        came = await self._alarm.wait(duration_s)
        if came:
            self._alarm = self.world.signal()
        return not came

    # --------------------------------------------------------------------------------------------------------- forming
    async def form(self, window: int) -> bool:
        """Seat every stage, have all load their layers and greet their neighbours. False: not this time."""
        seats = self._seated()
        if seats is None:
            self.journal("no spare", banned=self.banned, suspects=sorted(self._suspects))
            self._suspects.clear()  # better a doubtful node than none: it may have recovered
            await self.quiet(self.config.spare_wait_s)
            return False
        self.epoch += 1
        self._begin(self.epoch)
        plan = self.plan(seats, window)
        try:
            await self.stage.join(plan)
        except Refused as refusal:
            raise RuntimeError(f"the head's own stage cannot join: {refusal.reason}") from refusal
        faults = await self.world.gather(*(self._ask(name, name, JoinRing(plan)) for name in seats[1:]))
        if not any(faults) and len(seats) > 1:
            pairs = itertools.pairwise(seats[1:])
            greetings = [self._greet_own(seats[1]), *(self._ask(*pair, GreetNeighbours(self.epoch)) for pair in pairs)]
            faults = await self.world.gather(*greetings)
        for unfit, reason in filter(None, faults):
            self.journal("unfit", stage=unfit, epoch=self.epoch, reason=reason)
            self._suspects.add(unfit)
        if any(faults):
            return False
        self.seats, self.up = seats, True
        self.journal("ring up", epoch=self.epoch, seats=seats)
        return True

    def _seated(self) -> list[str] | None:
        """A node for each stage: those that sat well stay, spares take the other seats; None: there are too few."""
        good = [name for name in self.nodes if name not in self._suspects.union(self.banned)]
        old = [*self.seats, *[""] * len(self.config.cuts)][: len(self.config.cuts)]
        seats = [name if name in good else "" for name in old]
        spares = [name for name in good if name not in seats]
        if self.world.name not in seats:
            seats[0] = spares.pop(spares.index(self.world.name))
        for at, name in enumerate(seats):
            if not name:
                if not spares:
                    return None
                seats[at] = spares.pop(0)
        return seats

    def plan(self, seats: Sequence[str], window: int) -> RingPlan:
        """The ring over these nodes."""
        c, edges = self.config, (0, *self.config.cuts)
        members = tuple(
            Member(name=name, public_key=self.nodes[name], first=edges[at], end=edges[at + 1])
            for at, name in enumerate(seats)
        )
        return RingPlan(
            ring=c.ring,
            epoch=self.epoch,
            version=VERSION,
            checkpoint=self.stage.parts.checkpoint,
            layers=c.layers,
            hidden=c.hidden,
            dtype=c.dtype,
            members=members,
            micro_batches=c.micro_batches,
            rows=c.rows,
            capacity_tokens=c.capacity_tokens,
            window=window,
            signed=c.signed,
            keep_evidence=c.keep_evidence,
            chunk_tokens=c.chunk_tokens,
            top_k=c.top_k,
            sampling_temperature=c.temperature,
            sampling_top_k=c.sampling_top_k,
            sampling_top_p=c.top_p,
        )

    async def _ask(self, name: str, refused: str, message: Message) -> tuple[str, str] | None:
        """Have a node join, or greet its successor. None when it did, else who is unfit and why: `refused` when it says
        no (of a greeting: its successor cannot be reached, or says no), the node itself when it does not answer."""
        try:
            await self.world.call(name, message, self.config.join_timeout_s)
        except Refused as refusal:
            return refused, refusal.reason or "no reason given"
        except CallError as error:
            return name, error.reason or "no reason given"
        return None

    async def _greet_own(self, successor: str) -> tuple[str, str] | None:
        try:
            await self.stage.greet(self.formation)
        except Refused as refusal:
            return successor, refusal.reason
        return None

    # ---------------------------------------------------------------------------------------------------- when it hangs
    async def find_hang(self, issued: int, overdue: Callable[[], bool]) -> None:
        """Two looks at all counters. Who does not answer, or holds a pass that is overdue and has not moved between the
        looks, loses its seat; who was restarted keeps it, and the ring is formed again."""
        before = await self.counters()
        if all(before):
            await self.world.sleep(min(self.config.probe_timeout_s, self.config.overdue_s_min))
        after = await self.counters()
        blockage = find_blockage(issued, after, self.seats, self.epoch)
        if not self.up or blockage is None:
            return
        lost = [name for name, report in zip(self.seats, after, strict=True) if report is None]
        restarted = any(report is not None and report.epoch != self.epoch for report in after)
        if not lost and not restarted and (_moved(before, after) or not overdue()):
            return  # slow, not stuck
        self.blockages.append(blockage)
        self.journal("blockage", epoch=self.epoch, reason=blockage.sentence)
        self.unseat(lost or ([] if restarted else [self._doubtful(blockage)]))

    def _doubtful(self, blockage: Blockage) -> str:
        """Which node to try without: of a link its receiver, but its sender where another receiver did not help."""
        if blockage.to is None:
            return blockage.stage
        again = blockage.stage == self._link_sender
        self._link_sender = blockage.stage
        receiver_stays = blockage.to == self.world.name or (again and blockage.stage != self.world.name)
        return blockage.stage if receiver_stays else blockage.to

    async def counters(self) -> list[Progress | None]:
        """Every stage's own count; None for one that does not answer."""
        return list(await self.world.gather(*(self._counter(name) for name in self.seats)))

    async def _counter(self, name: str) -> Progress | None:
        if name == self.world.name:
            own = self.formation
            return Progress(name, own.plan.epoch, own.taken, own.computed, own.delivered.count, own.busy_s)
        try:
            report = await self.world.call(name, AskProgress(self.epoch), self.config.probe_timeout_s)
        except CallError:
            return None
        return Progress(name, report.epoch, report.received, report.computed, report.delivered, report.busy_s)

    def unseat(self, names: Sequence[str]) -> None:
        """These nodes lose their seats (the head's own keeps its); the ring is to be formed again."""
        self._suspects |= set(names) - {self.world.name}
        self.up = False

    async def trouble(self, source: str, message: ReportTrouble) -> Message:
        """A stage says that a link does not work."""
        if self.up and message.epoch == self.epoch and source in self.seats:
            link = {"sender": message.sender, "receiver": message.receiver}
            self.journal("reported", source=source, reason=message.reason, **link)
            self.alarm()
        return Ok()

    async def announce(self, source: str, message: Announce) -> Message:
        """A node can be a stage, or can again: it is used where one is missing. Raises `Refused` with the reason."""
        if fault := self._unwanted(source, message):
            raise Refused(fault)
        self.nodes.setdefault(source, message.public_key)
        self._suspects.discard(source)
        self.alarm()  # a seated node that announces itself was restarted, and its caches are gone
        return Ok()

    def _unwanted(self, name: str, message: Announce) -> str:
        """Why this node gets no seat here; empty if it may have one."""
        key, known = message.public_key, self.nodes.get(name)
        if message.version != VERSION:
            return f"version is {message.version}, expected {VERSION}"
        if key in self._banned or known in self._banned:
            return f"node {name!r} is banned here"
        if known is not None:
            return "" if known == key else f"node {name!r} is known under another key"
        if not self.config.strangers:
            return f"node {name!r} is none of those that this ring was started with"
        if key in self.nodes.values():
            return f"the key of node {name!r} is that of a node with another name"
        if not is_public_key(key):
            return f"{key[:80]!r} is no public key"
        return f"there are {NODES_MAX} nodes already" if len(self.nodes) >= NODES_MAX else ""


def _moved(before: Sequence[Progress | None], after: Sequence[Progress | None]) -> bool:
    """Did any stage get on between two looks?"""
    return [a and (a.received, a.computed, a.delivered) for a in before] != [
        a and (a.received, a.computed, a.delivered) for a in after
    ]
