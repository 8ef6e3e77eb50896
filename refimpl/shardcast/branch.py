"""A node's place in the relays' tree: what it answers when asked (`Branch`), and how a relay comes to hang elsewhere
(`Reparenting`).

From time to time a relay asks its neighbours where they hang, has a small probe sent by its parent and by those that it
has not measured for longest, and moves when `topology.py` says that it is worth it. Before it moves, it asks and probes
the new parent once more. A parent that is silent twice is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from refimpl.journal import Journal, silent
from refimpl.messages import Blob, Message
from refimpl.shardcast.messages import AskPosition, AskProbe, Probe, TreePosition
from refimpl.shardcast.puller import Puller
from refimpl.shardcast.serving import ShardServer
from refimpl.shardcast.topology import (
    ENDLESS,
    EPOCH_MAX,
    NOWHERE,
    PROBE_BYTES_MAX,
    LinkRates,
    Place,
    Position,
    Rank,
    TreeRules,
    choose_parent,
    position_below,
)
from refimpl.world import CallError, Refused, World


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """How a node takes part in the tree."""

    neighbours: tuple[str, ...] = ()  # relays that may become the parent; the first source and the origin always may
    every_s: float = 10.0  # between two looks around
    timeout_s: float = 5.0  # of a question or a probe
    probes: int = 2  # beside the parent's, at each look
    strikes: int = 2  # unanswered questions after which a node counts as gone
    slots: int = 8  # children that this node takes
    epoch_s: float = 30.0  # the origin begins a new epoch at most so often
    rules: TreeRules = field(default_factory=TreeRules)


class Branch:
    """Answers questions and probes; counts who says that it hangs below this node."""

    def __init__(
        self, world: World, config: TreeConfig, server: ShardServer, position: Callable[[int], Position]
    ) -> None:
        self.world, self.config, self.server = world, config, server
        self._position = position  # free slots -> what this node says of itself
        self._children: dict[str, float] = {}  # when each was last heard of
        self.epoch_heard = -1

    def serve(self) -> None:
        self.world.serve({AskPosition: self.tell, AskProbe: self.probe})

    @property
    def free_slots(self) -> int:
        gone_s = self.world.now() - (self.config.strikes + 1) * self.config.every_s
        self._children = {name: at_s for name, at_s in self._children.items() if at_s > gone_s}
        return self.config.slots - len(self._children)

    async def tell(self, source: str, message: AskPosition) -> Message:
        self.epoch_heard = max(self.epoch_heard, min(message.epoch, EPOCH_MAX))
        free = self.free_slots
        said = self._position(free + (source in self._children))
        if message.below and (free > 0 or source in self._children):
            self._children[source] = self.world.now()
        elif not message.below:
            self._children.pop(source, None)
        rank = said.rank
        return TreePosition(said.name, said.path, said.rate_bytes_per_s, said.free_slots, rank.epoch, rank.depth)

    async def probe(self, source: str, message: AskProbe) -> Message:
        size = message.size_bytes
        if not 0 < size <= PROBE_BYTES_MAX:
            raise Refused(f"a probe of {size} bytes was asked for, 1 to {PROBE_BYTES_MAX} were expected")
        address = self.server.address_of_caller()
        with self.server.transfer(source, address):
            await self.server.pay(source, size, address)
        return Probe(Blob(size, "probe") if self.server.config.virtual else Blob(size, "", bytes(size)))


class Root:
    """The origin's place: above all, with an epoch that rises."""

    def __init__(self, world: World, config: TreeConfig, server: ShardServer) -> None:
        self.world, self.config = world, config
        self.branch = Branch(world, config, server, self._position)
        self._epoch, self._since_s = 0, world.now()

    def _position(self, free_slots: int) -> Position:
        now_s = self.world.now()
        heard = self.branch.epoch_heard
        if now_s - self._since_s >= self.config.epoch_s or heard > self._epoch:
            self._epoch, self._since_s = min(max(self._epoch, heard) + 1, EPOCH_MAX), now_s
        return Position(self.world.name, (), ENDLESS, Rank(self._epoch, 0), free_slots)


class Reparenting:
    """A relay's place: `run()` until the puller stops. `puller`'s one source is the parent."""

    def __init__(
        self, world: World, config: TreeConfig, puller: Puller, server: ShardServer, journal: Journal = silent
    ) -> None:
        self.world, self.config, self.puller, self.journal = world, config, puller, journal
        self.place = Place(puller.sources[0], NOWHERE)
        self.links = LinkRates()
        self.positions: dict[str, Position] = {}  # by address: what each said last
        self.branch = Branch(world, config, server, self._position)
        self._strikes: Counter[str] = Counter()
        self._lost_looks = 0  # at which the parent had no place itself
        known = [*puller.sources, *config.neighbours, *([puller.config.origin] if puller.config.origin else [])]
        self._neighbours = list(dict.fromkeys(known))
        puller.use((self.place.parent,))

    def _position(self, free_slots: int) -> Position:
        parent = self.positions.get(self.place.parent)
        rate = self.links.rate(self.place.parent, self.world.now(), parent=self.place.parent)
        if parent is None or rate is None:
            return Position(self.world.name, (), 0.0, self.place.rank, 0)
        return position_below(self.world.name, parent, rate, self.place.rank, free_slots)

    async def run(self) -> None:
        await self.puller.stopped.wait(self.config.every_s * float(self.world.rng.uniform(0.0, 0.5)))
        while not self.puller.stopped.is_set():
            await self.look_around()
            pause_s = self.config.every_s * float(self.world.rng.uniform(0.75, 1.25))  # not all at once
            await self.puller.stopped.wait(pause_s)

    async def look_around(self) -> None:
        """One round: ask all, measure some, move or stay."""
        parent = self.place.parent
        await self.world.gather(*(self._ask(node, below=node == parent) for node in self._neighbours))
        self._neighbours = [node for node in self._neighbours if not self._is_me(node)]
        others = [node for node in self._neighbours if node in self.positions and node != parent]
        self._count_what_came(parent)
        for node in [parent, *self.links.oldest(others, self.config.probes)]:
            await self._probe(node)  # one after the other: they would share the line
        if self._parent_has_just_begun(parent):
            return
        wanted = self._choose()
        if wanted.parent != parent:  # once more, now that it matters
            await self._ask(wanted.parent, below=True)
            await self._probe(wanted.parent)
            wanted = self._choose()
        before, self.place = self.place, wanted
        if wanted.parent != before.parent:
            self.journal("moved", parent=wanted.parent, before=before.parent)
            self.puller.use((wanted.parent,))

    def _is_me(self, node: str) -> bool:
        said = self.positions.get(node)
        return said is not None and said.name == self.world.name

    def _parent_has_just_begun(self, parent: str) -> bool:
        """It answers and does not know its own place: not at the first looks, when all begin at once; but not for ever
        either."""
        position = self.positions.get(parent)
        begun = position is not None and not position.path and not position.is_origin
        self._lost_looks = self._lost_looks + 1 if begun else 0
        return begun and self._lost_looks <= self.config.strikes

    def _choose(self) -> Place:
        rates = self.links.rates(self.world.now(), parent=self.place.parent)
        return choose_parent(self.world.name, self.place, self.positions, rates, self.config.rules)

    def _count_what_came(self, parent: str) -> None:
        found = (1.0, self.config.every_s) if self.puller.distrusts(parent) else self.puller.throughput()
        if found is None:
            self.links.quiet(parent)
        else:
            self.links.came(parent, *found, self.world.now())

    async def _ask(self, node: str, *, below: bool) -> None:
        asked_s = self.world.now()
        try:
            said = await self.world.call(node, AskPosition(self.place.rank.epoch, below), self.config.timeout_s)
        except CallError:
            self._strikes[node] += 1
            if self._strikes[node] >= self.config.strikes:
                self.positions.pop(node, None)
            return
        self._strikes[node] = 0
        self.links.answered(node, self.world.now() - asked_s)
        rank = Rank(min(said.epoch, EPOCH_MAX), max(said.depth, 0))
        self.positions[node] = Position(said.name, said.path, said.rate_bytes_per_s, rank, said.free_slots)

    async def _probe(self, node: str) -> None:
        if node not in self.positions:
            return
        size, asked_s = self.links.probe_bytes(node), self.world.now()
        try:
            probe = await self.world.call(node, AskProbe(size), self.config.timeout_s)
            took_s = self.world.now() - asked_s if probe.blob.size_bytes == size else self.config.timeout_s
        except CallError:
            took_s = self.config.timeout_s  # not all of it came, so it is no faster than that
        self.links.probed(node, size, max(took_s, 1e-6), self.world.now())
