"""A tree of SHARDCAST roles on one fabric, simulated or real, and all that they note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refimpl.attacks.relays import SPOILS
from refimpl.identity import Identity, verify
from refimpl.shardcast.client import Client
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.limits import ServingLimits
from refimpl.shardcast.origin import Origin
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.relay import Relay
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import MemoryStore

KEY = Identity.from_seed(1, "origin")
LAYOUT = Layout(names=("model.safetensors",), sizes_bytes=(1_050_000,), shard_bytes=100_000)


class Tree:
    """origin → relays → clients, on some fabric. `notes` are all journal entries."""

    def __init__(
        self, fabric: Any, *, relays: int = 2, clients: int = 2, spoil: dict[int, str] | None = None,
        policy: str = "expected-finish", origin_key: str = KEY.public_key, virtual: bool = True,
        increments: int = 0, store: Callable[[str], Any] = lambda name: MemoryStore(0.02), keep: int = 5,
        limits: ServingLimits = ServingLimits(), origin_known: bool = True, **pull: Any,
    ) -> None:  # fmt: skip
        self.fabric = fabric
        self.notes: list[tuple[str, str, dict[str, Any]]] = []
        names = [f"relay{i}" for i in range(relays)]
        self.worlds = {name: fabric.node(name) for name in ["origin", *names, *(f"client{i}" for i in range(clients))]}
        served = ServingConfig(below=tuple(names), virtual=virtual, keep=keep)
        self.origin = Origin(
            self.worlds["origin"],
            "run",
            KEY,
            verify,
            served,
            store("origin"),
            self._journal("origin"),
            increments=increments,
        )
        self.origin.serve()
        below = tuple(f"client{i}" for i in range(clients))
        passing = ServingConfig(below=below, virtual=virtual, keep=keep, limits=limits)

        def pulling(sources: tuple[str, ...]) -> PullerConfig:
            return PullerConfig(
                sources=sources, origin="origin" if origin_known else "", origin_key=origin_key, policy=policy,
                news_patience_s=0.5, news_interval_s=0.01, retry_s=0.1, **pull,
            )  # fmt: skip

        self.relays = []
        for i, name in enumerate(names):
            chosen = SPOILS[spoil[i]] if spoil and i in spoil else None
            relay = Relay(
                self.worlds[name], pulling(("origin",)), passing,
                store(name), verify, self._journal(name), chosen,
            )  # fmt: skip
            relay.serve()
            self.relays.append(relay)
        self.clients = []
        for name in below:
            client = Client(
                self.worlds[name],
                pulling(tuple(names)),
                store(name),
                verify,
                last_version=99,
                journal=self._journal(name),
            )
            client.serve()
            self.clients.append(client)

    def _journal(self, node: str) -> Any:
        def note(kind: str, /, **fields: Any) -> None:
            self.notes.append((node, kind, {"t_s": self.worlds[node].now(), **fields}))

        return note

    def start(self) -> None:
        for role in (*self.relays, *self.clients):
            role.world.spawn(role.run(), "pull")

    async def all_have(self, version: int, patience_s: float = 60.0) -> bool:
        world = self.worlds["origin"]
        until = world.now() + patience_s
        while world.now() < until:
            if all(version in client.complete for client in self.clients):
                return True
            await world.sleep(0.05)
        return False

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [{"node": node, **fields} for node, noted, fields in self.notes if noted == kind]
