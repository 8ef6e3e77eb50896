"""What SHARDCAST's roles say to each other. Documents travel as their canonical bytes; who reads them checks them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from refimpl.identity import Identity
from refimpl.messages import Blob, Message, wire
from refimpl.shardcast.manifest import Header


@wire
@dataclass(frozen=True)
class AskNews(Message):
    """Anybody -> origin or relay: what is the newest version, and which of its shards may be fetched by now?

    A client that knows `entries` shards of version `version` is answered once there is more, or after `patience_s`.
    `have` is what it holds complete: so a relay knows who lags, and which increments are of use.
    """

    version: int  # the newest that the asker knows; -1: none
    entries: int  # provisional entries of it that it has
    final: str  # the content hash in its final manifest of it; empty: it has none yet
    have: int  # the version that it holds complete; -1: none
    increments: tuple[int, ...]  # offers on the way from there that it knows, each by its `tag`
    patience_s: float


def tag(header: Header) -> int:
    """Tells increments on offer apart, in few bytes."""
    return int(header.id[:8], 16)


@wire
@dataclass(frozen=True)
class News(Message):
    """The answer: all that the asker did not know. Empty bytes: nothing new of that kind."""

    version: int  # the newest that is known here; -1: none
    opening: bytes
    entries: tuple[bytes, ...]
    manifest: bytes
    increments: tuple[bytes, ...] = ()  # manifests of increments on the way from `have` to `version`
    between: tuple[bytes, ...] = ()  # manifests of the versions that they lead to before that


@wire
@dataclass(frozen=True)
class Announced(Message):
    """Origin or relay -> those below that lag: there is something new, come and get it."""

    version: int


@wire
@dataclass(frozen=True)
class AskShard(Message):
    """Client or relay -> relay or origin: give me bytes [offset, offset + size) of this shard of this version."""

    header_id: str
    index: int
    offset: int
    size: int


@wire
@dataclass(frozen=True)
class Piece(Message):
    """The bytes, all of them; `here` is false when this node does not have the shard so far."""

    here: bool
    blob: Blob


@wire
@dataclass(frozen=True)
class PublishOrder(Message):
    """Whoever has the origin's key -> origin: broadcast this file or folder, which both of us see on disk."""

    path: str
    number: int  # rises with each order, so that none can be sent twice
    signature: bytes = b""  # by the origin's own key, over `order_bytes`


@wire
@dataclass(frozen=True)
class Published(Message):
    """The order is carried out: the version is out."""

    version: int
    content_id: str
    size_bytes: int


def order_bytes(order: PublishOrder) -> bytes:
    """What the signature of an order covers."""
    return f"publish|{order.number}|".encode() + order.path.encode()


@wire
@dataclass(frozen=True)
class Complaint(Message):
    """Client -> origin (through relays): this relay gave me a shard that is not what you signed."""

    relay: str
    header_id: str
    index: int
    received_sha256: bytes
    by: str  # public key of who complains
    signature: bytes = b""  # over `complaint_bytes`


def complaint_bytes(complaint: Complaint) -> bytes:
    """What the signature covers. Lengths are part of it, so that no two complaints share it."""
    relay = complaint.relay.encode()
    words = f"{len(relay)}|{complaint.header_id}|{complaint.index}|{complaint.received_sha256.hex()}|{complaint.by}|"
    return words.encode() + relay


def signed_complaint(identity: Identity, relay: str, header_id: str, index: int, found: bytes) -> Complaint:
    """That `relay` gave a shard of this version with this hash."""
    said = Complaint(relay, header_id, index, found, identity.public_key)
    return replace(said, signature=identity.sign(complaint_bytes(said)))


@wire
@dataclass(frozen=True)
class AskPosition(Message):
    """Relay -> relay or origin: where do you hang, and how fast does data reach you?"""

    epoch: int  # the newest that the asker knows: an origin that was started again goes on from there
    below: bool  # the asker hangs below the one asked, or is about to


@wire
@dataclass(frozen=True)
class TreePosition(Message):
    """The answer; see `topology.Position`."""

    name: str
    path: tuple[str, ...]
    rate_bytes_per_s: float  # `topology.ENDLESS`: the origin's own
    free_slots: int
    epoch: int
    depth: int


@wire
@dataclass(frozen=True)
class AskProbe(Message):
    """Relay -> relay or origin: send me so many bytes, I want to know how long that takes."""

    size_bytes: int


@wire
@dataclass(frozen=True)
class Probe(Message):
    """The bytes."""

    blob: Blob
