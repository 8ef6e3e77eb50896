"""What SHARDCAST's roles say to each other. Documents travel as their canonical bytes; who reads them checks them."""

from __future__ import annotations

from dataclasses import dataclass

from refimpl.messages import Blob, Message, wire


@wire
@dataclass(frozen=True)
class AskNews(Message):
    """Anybody -> origin or relay: what is the newest version, and which of its shards may be fetched by now?

    A client that knows `entries` shards of version `version` is answered once there is more, or after `patience_s`.
    """

    version: int  # the newest that the asker knows; -1: none
    entries: int  # provisional entries of it that it has
    final: bool  # it has the final manifest of it
    patience_s: float


@wire
@dataclass(frozen=True)
class News(Message):
    """The answer: all that the asker did not know. Empty bytes: nothing new of that kind."""

    version: int  # the newest that is known here; -1: none
    opening: bytes
    entries: tuple[bytes, ...]
    manifest: bytes


@wire
@dataclass(frozen=True)
class Announced(Message):
    """Origin or relay -> those below: there is something new, come and get it."""

    version: int


@wire
@dataclass(frozen=True)
class AskShard(Message):
    """Client or relay -> relay or origin: give me this shard of this version."""

    header_id: str
    index: int


@wire
@dataclass(frozen=True)
class Shard(Message):
    """The shard; `here` is false when this node does not have it so far."""

    here: bool
    blob: Blob


@wire
@dataclass(frozen=True)
class Complaint(Message):
    """Client -> origin: this relay gave me a shard that is not what you signed."""

    relay: str
    header_id: str
    index: int
    received_sha256: bytes
