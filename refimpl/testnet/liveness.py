"""Who is alive, by heartbeats: the original orchestrator's table of states, as a core.

Source: protocol 1bb7f87c. A heartbeat counts for `ttl_s`; a pass every `pass_s` looks at each node and moves it along
`WITH_BEAT` or `WITHOUT_BEAT`. With the defaults a crashed node is Dead 120 to 150 s after its last beat.

Differs from the original: 1) nodes are told apart by key, never by address, so that two behind one NAT do not overwrite
each other; 2) states that mirror a chain's records (Ejected, Banned, LowBalance) belong to the ledger and are not kept
here; 3) a pass costs as much as there are nodes without a fresh beat, not as there are nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """A node as the orchestrator sees it."""

    DISCOVERED = "discovered"
    WAITING = "waiting"  # invited, no heartbeat yet
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"


WITH_BEAT: dict[State, State] = {
    State.DISCOVERED: State.HEALTHY,
    State.WAITING: State.HEALTHY,
    State.UNHEALTHY: State.HEALTHY,
    State.DEAD: State.HEALTHY,
}
"""The next state of a pool member whose beat is fresh; others stay."""

WITHOUT_BEAT: dict[State, tuple[State, str]] = {
    State.HEALTHY: (State.UNHEALTHY, "at once"),
    State.UNHEALTHY: (State.DEAD, "after misses"),
    State.WAITING: (State.UNHEALTHY, "after misses"),
    State.DISCOVERED: (State.UNHEALTHY, "at once"),
}
"""The next state of a pool member without a fresh beat, and when: at once, or when its misses reach the bound."""


@dataclass(frozen=True, kw_only=True)
class LivenessConfig:
    """How patient the orchestrator is."""

    ttl_s: float = 90.0  # a heartbeat is fresh for this long
    misses_max: int = 3  # passes without a fresh beat after which the slow transitions happen

    def __post_init__(self) -> None:
        if self.ttl_s <= 0 or self.misses_max < 1:
            raise ValueError(
                f"ttl_s {self.ttl_s} and misses_max {self.misses_max}: above 0 and 1 or more were expected"
            )


@dataclass(slots=True)
class _Entry:
    state: State
    last_beat_s: float
    misses: int = 0  # passes without a fresh beat since the last one


@dataclass(frozen=True)
class Change:
    """One node's move."""

    node: str
    before: State
    after: State


class NodeTable:
    """Every node's state. `now` is an argument: the table has no clock."""

    def __init__(self, config: LivenessConfig) -> None:
        self.config = config
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recent beat first; without the dead
        self._dead: set[str] = set()

    def invite(self, node: str, now_s: float) -> None:
        """The node was asked to join; it is expected to beat. One that is known already stays as it is."""
        if node not in self._entries and node not in self._dead:
            self._entries[node] = _Entry(State.WAITING, now_s)

    def beat(self, node: str, now_s: float) -> Change | None:
        """A heartbeat came. Returns the node's move, if it makes one."""
        entry = self._entries.get(node)
        if entry is None:
            entry = self._entries[node] = _Entry(State.DEAD if node in self._dead else State.WAITING, now_s)
            self._dead.discard(node)
        self._entries.move_to_end(node)
        entry.last_beat_s, entry.misses = now_s, 0
        if entry.state is State.HEALTHY:
            return None
        after = WITH_BEAT[entry.state]
        change = Change(node, entry.state, after)
        entry.state = after
        return change

    def status_pass(self, now_s: float) -> list[Change]:
        """Look at every node without a fresh beat. Returns the moves, least recent beat first."""
        changes = []
        for node, entry in self._entries.items():
            if now_s - entry.last_beat_s <= self.config.ttl_s:
                break  # all that follow have beaten since
            if entry.state not in WITHOUT_BEAT:
                continue
            entry.misses += 1
            after, when = WITHOUT_BEAT[entry.state]
            if when == "at once" or entry.misses >= self.config.misses_max:
                changes.append(Change(node, entry.state, after))
                entry.state = after
        for change in changes:
            if change.after is State.DEAD:  # out of the way of the next passes
                del self._entries[change.node]
                self._dead.add(change.node)
        return changes

    def state(self, node: str) -> State | None:
        """The node's state; None for one never heard of."""
        if node in self._dead:
            return State.DEAD
        entry = self._entries.get(node)
        return entry.state if entry is not None else None

    def counts(self) -> dict[str, int]:
        """How many nodes are in each state."""
        counts = dict.fromkeys((state.value for state in State), 0)
        for entry in self._entries.values():
            counts[entry.state.value] += 1
        counts[State.DEAD.value] = len(self._dead)
        return counts
