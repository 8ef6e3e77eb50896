"""What a version *is*: the signed documents that make bytes from any relay checkable.

Three documents, all signed by the origin's key, all canonical JSON, all read as hostile input:

- `Opening`: "version 12 of run R is coming: these files, cut into shards of this size." Sent first.
- `ShardEntry`: "its shard 7 has this size and this SHA-256." Provisional: shard 7 travels while shard 8 is being cut.
- `Manifest`: all hashes and their Merkle root. Published last, in one piece. Nothing reaches a final path without it,
  and it must agree with every entry that went before (`Expected`).

A version belongs to a run id and a content hash, so its number is never an identity by itself. File names are labels of
one path component from a small alphabet: no document can name a place outside the folder that it is unpacked into.

The whole is named by the Merkle root, not by one SHA-256 over all bytes: that would be a second pass over every byte,
and one that no second core can help with (62 GB: a minute).

Differs from the original (shardcast 0.3.2): 1) hash per shard and a Merkle root, not one hash of the whole file;
2) signed; 3) SHA-256, as the paper says (the package uses BLAKE3); 4) run id and content hash beside the version
number; 5) a version may hold several files, cut as one stream; 6) provisional entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from refimpl.shardcast.document import (
    Fields,
    ManifestError,
    canonical,
    check_hex,
    check_list,
    check_name,
    hex_digest,
    natural,
    parse_document,
)
from refimpl.shardcast.layout import FILES_MAX, SHARD_BYTES_MAX, SHARDS_MAX, SIZE_BYTES_MAX, Layout
from refimpl.shardcast.merkle import merkle_root

VERSION_MAX = 10**12
MANIFEST_BYTES_MAX = 8 << 20  # 65 536 shards are 4.4 MB
ENTRY_BYTES_MAX = 1 << 10
OPENING_BYTES_MAX = 1 << 20

Sign = Callable[[bytes], bytes]
"""The origin's signature over these bytes: `identity.sign`."""
Verify = Callable[[str, bytes, bytes], bool]
"""`verify(public_key_hex, content, signature)`; never raises."""


class Ref(NamedTuple):
    """A version, named so that it cannot be confused: number and content hash."""

    version: int
    content_id: str


class Stretch(NamedTuple):
    """Shards first, first + 1, … of a version: what one increment makes."""

    first: int
    length: int

    @property
    def shards(self) -> range:
        return range(self.first, self.first + self.length)


@dataclass(frozen=True, kw_only=True)
class Header:
    """All that is known of a version before its bytes are read. `base` not set: the payload is the version itself. Set:
    it is an increment (see `delta.py`), which makes the shards `stretch` of `target` out of `base`; the target, which
    may still be in the making, is named by the id of its header."""

    run_id: str
    version: int
    layout: Layout
    origin: str  # public key, 64 hex digits
    previous: Ref | None = None
    base: Ref | None = None
    target: Ref | None = None
    stretch: Stretch | None = None

    def __post_init__(self) -> None:
        check_name(self.run_id, "run id")
        if not 0 <= self.version <= VERSION_MAX:
            raise ManifestError(f"version is {self.version}, 0 to {VERSION_MAX} was expected")
        if not (self.base is None) == (self.target is None) == (self.stretch is None):
            raise ManifestError("an increment names its base, its target and the shards that it makes")
        if self.stretch is not None and not (self.stretch.first >= 0 < self.stretch.length):
            raise ManifestError(f"an increment makes at least one shard, not {self.stretch.length}")
        if (
            self.base is not None
            and self.target is not None
            and not self.base.version < self.target.version == self.version
        ):
            raise ManifestError(
                f"an increment to version {self.version} cannot lead from {self.base.version} to {self.target.version}"
            )
        if self.previous is not None and self.previous.version >= self.version:
            raise ManifestError(f"version {self.version} cannot follow version {self.previous.version}")

    @property
    def is_increment(self) -> bool:
        return self.base is not None

    @cached_property
    def id(self) -> str:
        """Names this header, and with it every provisional entry."""
        return hashlib.sha256(canonical("header", self.fields())).hexdigest()

    def fields(self) -> Fields:
        return {
            "run_id": self.run_id,
            "version": self.version,
            "files": [[name, size] for name, size in zip(self.layout.names, self.layout.sizes_bytes, strict=True)],
            "shard_bytes": self.layout.shard_bytes,
            "origin": self.origin,
            "previous": list(self.previous) if self.previous else None,
            "base": list(self.base) if self.base else None,
            "target": list(self.target) if self.target else None,
            "stretch": list(self.stretch) if self.stretch else None,
        }


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The origin's first word on a version."""

    header: Header
    signature: bytes

    @classmethod
    def signed(cls, header: Header, sign: Sign) -> Opening:
        return cls(header=header, signature=sign(canonical("opening", header.fields())))

    def encode(self) -> bytes:
        return canonical("opening", self.header.fields(), self.signature)

    @classmethod
    def decode(cls, raw: bytes, verify: Verify, origin: str) -> Opening:
        """Raises ManifestError for anything but an opening signed by `origin`."""
        fields, signature = parse_document(raw, "opening", OPENING_BYTES_MAX, _HEADER_KEYS)
        header = _read_header(fields)
        _check_signature("opening", fields, header.origin, signature, verify, origin)
        return cls(header=header, signature=signature)


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard's size and hash, ahead of the final manifest."""

    header_id: str
    index: int
    size_bytes: int
    sha256: bytes
    signature: bytes

    @classmethod
    def signed(cls, header: Header, index: int, sha256: bytes, sign: Sign) -> ShardEntry:
        size = header.layout.shard_size(index)
        unsigned = cls(header_id=header.id, index=index, size_bytes=size, sha256=sha256, signature=b"")
        signature = sign(canonical("entry", unsigned.fields()))
        return cls(header_id=header.id, index=index, size_bytes=size, sha256=sha256, signature=signature)

    def fields(self) -> Fields:
        return {
            "header_id": self.header_id,
            "index": self.index,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256.hex(),
        }

    def encode(self) -> bytes:
        return canonical("entry", self.fields(), self.signature)

    @classmethod
    def decode(cls, raw: bytes, header: Header, verify: Verify) -> ShardEntry:
        """Raises ManifestError for anything but an entry of this version, signed by its origin."""
        fields, signature = parse_document(raw, "entry", ENTRY_BYTES_MAX, _ENTRY_KEYS)
        entry = cls(
            header_id=hex_digest(fields, "header_id"),
            index=natural(fields, "index", SHARDS_MAX),
            size_bytes=natural(fields, "size_bytes", SHARD_BYTES_MAX),
            sha256=bytes.fromhex(hex_digest(fields, "sha256")),
            signature=signature,
        )
        if entry.header_id != header.id:
            raise ManifestError(f"the entry of shard {entry.index} belongs to another version")
        if entry.size_bytes != header.layout.shard_size(entry.index):
            raise ManifestError(
                f"shard {entry.index} is said to have {entry.size_bytes} bytes, "
                f"{header.layout.shard_size(entry.index)} was expected"
            )
        _check_signature("entry", fields, header.origin, signature, verify, header.origin)
        return entry


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The final word on a version."""

    header: Header
    shards_sha256: tuple[bytes, ...]
    signature: bytes = b""

    def __post_init__(self) -> None:
        count = self.header.layout.shard_count
        if len(self.shards_sha256) != count or any(len(digest) != 32 for digest in self.shards_sha256):
            raise ManifestError(f"{len(self.shards_sha256)} hashes for {count} shards, 32 bytes each were expected")

    @classmethod
    def signed(cls, header: Header, shards_sha256: Iterable[bytes], sign: Sign) -> Manifest:
        shards = tuple(shards_sha256)
        signature = sign(canonical("manifest", cls(header=header, shards_sha256=shards).fields()))
        return cls(header=header, shards_sha256=shards, signature=signature)

    @property
    def version(self) -> int:
        return self.header.version

    @property
    def layout(self) -> Layout:
        return self.header.layout

    @cached_property
    def root(self) -> bytes:
        return merkle_root(self.shards_sha256)

    @cached_property
    def content_id(self) -> str:
        """Hash of the content and of how it is cut: names, sizes and bytes of the files, whatever run or version."""
        files = [[name, size] for name, size in zip(self.layout.names, self.layout.sizes_bytes, strict=True)]
        content = {"files": files, "shard_bytes": self.layout.shard_bytes, "root": self.root.hex()}
        return hashlib.sha256(canonical("content", content)).hexdigest()

    @property
    def ref(self) -> Ref:
        return Ref(self.version, self.content_id)

    @property
    def label(self) -> str:
        """The folder name that this version has in a store."""
        if self.header.base is not None and self.header.stretch is not None:
            place = f"from-v{self.header.base.version:08d}-{self.header.stretch.first:05d}"
            return f"v{self.version:08d}-{place}-{self.content_id[:16]}"
        return f"v{self.version:08d}-{self.content_id[:16]}"

    def fields(self) -> Fields:
        return {
            **self.header.fields(),
            "shards_sha256": [digest.hex() for digest in self.shards_sha256],
            "root": self.root.hex(),
        }

    def encode(self) -> bytes:
        return canonical("manifest", self.fields(), self.signature)

    @classmethod
    def decode(cls, raw: bytes, verify: Verify, origin: str) -> Manifest:
        """Raises ManifestError for anything but a manifest signed by `origin`."""
        fields, signature = parse_document(raw, "manifest", MANIFEST_BYTES_MAX, _MANIFEST_KEYS)
        header = _read_header(fields)
        manifest = cls(
            header=header,
            shards_sha256=_read_hashes(fields, "shards_sha256", SHARDS_MAX),
            signature=signature,
        )
        if fields["root"] != manifest.root.hex():
            raise ManifestError(f"the Merkle root of version {header.version} does not match its shard hashes")
        _check_signature("manifest", fields, header.origin, signature, verify, origin)
        return manifest


def increment_header(base: Manifest, target: Header, stretch: Stretch, layout: Layout) -> Header:
    """The header under which the increment travels."""
    return Header(
        run_id=target.run_id,
        version=target.version,
        layout=layout,
        origin=target.origin,
        base=base.ref,
        target=Ref(target.version, target.id),
        stretch=stretch,
    )


class Equivocation(ManifestError):
    """The origin signed two things that contradict each other. `first` and `second` are the proof."""

    def __init__(self, reason: str, first: bytes = b"", second: bytes = b"") -> None:
        super().__init__(reason)
        self.first, self.second = first, second


class Expected:
    """What a client expects of each shard: from provisional entries first, from the manifest at last."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.manifest: Manifest | None = None
        self._entries: dict[int, ShardEntry] = {}

    def sha256(self, index: int) -> bytes | None:
        """The hash that shard `index` must have; None when the origin has not said yet."""
        if self.manifest is not None:
            return self.manifest.shards_sha256[index]
        entry = self._entries.get(index)
        return entry.sha256 if entry else None

    def known(self) -> list[int]:
        """The shards that may be fetched already."""
        if self.manifest is not None:
            return list(range(self.header.layout.shard_count))
        return sorted(self._entries)

    def add(self, entry: ShardEntry) -> None:
        """Take a (decoded, hence verified) entry. Raises Equivocation when it contradicts what was said before."""
        if entry.header_id != self.header.id:
            raise ManifestError(f"the entry of shard {entry.index} belongs to another version")
        said = self.sha256(entry.index)
        if said is not None and said != entry.sha256:
            earlier = self._entries.get(entry.index)
            first = self.manifest.encode() if self.manifest else earlier.encode() if earlier else b""
            raise Equivocation(f"the origin gave shard {entry.index} two hashes", first, entry.encode())
        self._entries[entry.index] = entry

    def finish(self, manifest: Manifest) -> None:
        """Take the (decoded, hence verified) manifest. Raises Equivocation when it does not agree with the entries."""
        if manifest.header != self.header:
            raise Equivocation(f"the final manifest of version {self.header.version} is not the one that was opened")
        for index, entry in sorted(self._entries.items()):
            if entry.sha256 != manifest.shards_sha256[index]:
                raise Equivocation(
                    f"the final manifest contradicts the entry of shard {index}", entry.encode(), manifest.encode()
                )
        self.manifest = manifest


# ------------------------------------------------------------------------------------------------ reading
_HEADER_KEYS = frozenset(
    {"run_id", "version", "files", "shard_bytes", "origin", "previous", "base", "target", "stretch"}
)
_ENTRY_KEYS = frozenset({"header_id", "index", "size_bytes", "sha256"})
_MANIFEST_KEYS = _HEADER_KEYS | {"shards_sha256", "root"}


def _read_ref(value: object, what: str) -> Ref | None:
    if value is None:
        return None
    items = check_list(value, what, 2)
    if len(items) != 2:
        raise ManifestError(f"{what} is {items!r:.80}, [version, content hash] was expected")
    return Ref(natural({what: items[0]}, what, VERSION_MAX), check_hex(items[1], what))


def _read_stretch(value: object) -> Stretch | None:
    if value is None:
        return None
    items = check_list(value, "stretch", 2)
    if len(items) != 2:
        raise ManifestError(f"stretch is {items!r:.80}, [first shard, number of shards] was expected")
    return Stretch(*(natural({"stretch": item}, "stretch", SHARDS_MAX) for item in items))


def _read_header(fields: Fields) -> Header:
    names, sizes = [], []
    for item in check_list(fields["files"], "files", FILES_MAX):
        if len(check_list(item, "a file", 2)) != 2:
            raise ManifestError(f"a file is {item!r:.80}, [name, size] was expected")
        names.append(check_name(item[0], "file name"))
        sizes.append(natural({"file size": item[1]}, "file size", SIZE_BYTES_MAX))
    return Header(
        run_id=check_name(fields["run_id"], "run id"),
        version=natural(fields, "version", VERSION_MAX),
        layout=Layout(
            names=tuple(names),
            sizes_bytes=tuple(sizes),
            shard_bytes=natural(fields, "shard_bytes", SHARD_BYTES_MAX),
        ),
        origin=hex_digest(fields, "origin"),
        previous=_read_ref(fields["previous"], "previous"),
        base=_read_ref(fields["base"], "base"),
        target=_read_ref(fields["target"], "target"),
        stretch=_read_stretch(fields["stretch"]),
    )


def _read_hashes(fields: Fields, key: str, count_max: int) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(check_hex(item, key)) for item in check_list(fields[key], key, count_max))


def _check_signature(kind: str, fields: Fields, key: str, signature: bytes, verify: Verify, origin: str) -> None:
    if key != origin:
        raise ManifestError(f"this {kind} names the origin {key[:16]}…, {origin[:16]}… was expected")
    if not verify(origin, canonical(kind, fields), signature):
        raise ManifestError(f"the signature of this {kind} is not the origin's")
