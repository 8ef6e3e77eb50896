"""Why: what a broadcast promises: every client ends with exactly what the origin published, or there is a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from refimpl.messages import Blob
from refimpl.shardcast.client import Client
from refimpl.shardcast.shelf import MemoryShelf
from sim.checkers import EVERY, SECOND_NS, Checkers, View
from sim.facts import Facts


@dataclass
class BroadcastFacts(Facts):
    """What has happened so far, by the log."""

    sizes: dict[int, int] = field(default_factory=dict)  # version -> bytes, as the origin announced it
    out_ns: dict[int, int] = field(default_factory=dict)  # version -> when all of it was out
    complete: dict[str, int] = field(default_factory=dict)  # client -> the newest version that it had whole, this life
    unknown: list[str] = field(default_factory=list)  # completions of what the origin did not publish

    def event(self, event: Mapping[str, Any]) -> None:
        """One line of the log."""
        super().event(event)
        kind, node = event["kind"], event["node"]
        if kind == "publishing":
            self.sizes[event["version"]] = event["size_bytes"]
        elif kind == "published":
            self.out_ns.setdefault(event["version"], event["t_ns"])
        elif kind == "complete":
            version, size_bytes = event["version"], event["size_bytes"]
            if version not in self.out_ns or self.sizes[version] != size_bytes:
                self.unknown.append(f"{node} has version {version} of {size_bytes} bytes; the origin published no such")
            self.complete[node] = max(version, self.complete.get(node, -1))

    @property
    def newest(self) -> int:
        """The newest version that is out; -1: none."""
        return max(self.out_ns, default=-1)

    def reason(self, client: str) -> str | None:
        """Why a client need not have the newest version by now; None: it must."""
        since_ns = self.out_ns[self.newest]
        if client not in self.up_ns:
            return "it is down"
        if self.excused(client):
            return "a fault is in force"
        if self.up_ns[client] > since_ns:
            return f"it came up at {self.up_ns[client] / SECOND_NS:.3f} s, after the version was out"
        if self.calm_ns > since_ns:
            return f"the last fault was at {self.calm_ns / SECOND_NS:.3f} s, after the version was out"
        return None


def something_was_published(view: BroadcastView) -> Iterator[str]:
    """By the end, at least one version is out."""
    if view.over and not view.facts.out_ns:
        yield f"nothing ever happened: no version was out by {view.now_ns / SECOND_NS:.3f} s"


def clients_have_it(view: BroadcastView) -> Iterator[str]:
    """By the end, every client has the newest version, or a reason: it is down, came up later, or there was a fault."""
    facts = view.facts
    if not view.over or not facts.out_ns:
        return
    for name in view.names:
        has = facts.complete.get(name, -1)
        if has < facts.newest and facts.reason(name) is None:
            hoard = view.clients[name].puller.hoard
            found = "nothing" if hoard is None else f"{len(hoard.here)} shards of version {hoard.header.version}"
            yield f"{name} has {found} at {view.now_ns / SECOND_NS:.3f} s; version {facts.newest} is out"


def complete_is_exact(view: BroadcastView) -> Iterator[str]:
    """What a client calls complete is, shard by shard, what the origin cut."""
    if not view.over:
        return
    expected: dict[int, list[tuple[int, str]]] = {}
    for name, client in view.clients.items():
        hoard = client.puller.hoard
        if hoard is None or hoard.header.version not in client.complete:
            continue
        version, count = hoard.header.version, hoard.header.layout.shard_count
        if version not in expected:
            read = view.cut(version)
            expected[version] = [(blob.size_bytes, blob.content_id) for blob in map(read, range(count))]
        for index, right in enumerate(expected[version]):
            blob = cast(MemoryShelf, hoard.shelf).blobs.get(index)
            if blob is None or (blob.size_bytes, blob.content_id) != right:
                yield f"{name} says that version {version} is complete; its shard {index} is not what the origin cut"
                break


def only_published_is_complete(view: BroadcastView) -> Iterator[str]:
    """No client completes a version that the origin did not publish, or another size of it."""
    yield from view.facts.unknown


BROADCAST: Checkers = (
    ("liveness", something_was_published),
    ("liveness", clients_have_it),
    ("correctness", complete_is_exact),
    ("correctness", only_published_is_complete),
)


@dataclass(frozen=True, kw_only=True)
class BroadcastView(View):
    """What a broadcast's checkers see."""

    facts: BroadcastFacts
    checkers: Checkers = EVERY + BROADCAST
    names: tuple[str, ...]  # of the clients
    clients: Mapping[str, Client]  # those that ever came up
    cut: Callable[[int], Callable[[int], Blob]]  # version -> its shards, as the origin cuts them
