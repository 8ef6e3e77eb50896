"""Which versions exist, in which order, which may go, and who still needs them.

The index is what keeps a node from being led astray: a version number is used once per run, an older index never hides
a newer one, and a hiccup upstream changes nothing (there is no "replace the index", only `add`).

Differs from the original (shardcast 0.3.2): 1) numbers are never reused, and a second content under one number is
reported, not fetched; 2) an upstream that cannot be reached, or lists less, takes nothing away; 3) a version that a
client holds a lease on is not removed; 4) what was removed is answered with "gone, take this one", not "not found".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from refimpl.shardcast.manifest import Equivocation, Manifest, ManifestError, Ref

KEEP = 5  # versions on a relay, as in the original
HOLDERS_MAX = 100_000


class Standing(Enum):
    """What a node can say about a version that it is asked for."""

    HERE = "here"
    GONE = "gone"  # it was here, or is older than all that is: take the newest
    UNKNOWN = "unknown"  # not yet


class VersionIndex:
    """All versions of one run that this node has heard of, from manifests that are decoded, hence signed."""

    def __init__(self, run_id: str, origin: str) -> None:
        self.run_id, self.origin = run_id, origin
        self._full: dict[int, Manifest] = {}
        self._increments: dict[tuple[int, int, int], Manifest] = {}  # by base, target and first shard
        self._seen: dict[int, tuple[str, bytes]] = {}  # version -> content id, the document; never forgotten
        self._seen_increments: dict[tuple[int, int, int], str] = {}

    def add(self, manifest: Manifest) -> bool:
        """True when it is news. Raises Equivocation when the origin said otherwise before, ManifestError when it is of
        another run."""
        header = manifest.header
        if header.run_id != self.run_id or header.origin != self.origin:
            raise ManifestError(f"version {header.version} belongs to run {header.run_id!r}, not to {self.run_id!r}")
        for ref in (header.previous, header.base):
            if ref is not None:
                self._check_ref(ref, manifest)
        if header.base is not None and header.stretch is not None:
            key = (header.base.version, header.version, header.stretch.first)
            if self._seen_increments.setdefault(key, manifest.content_id) != manifest.content_id:
                reason = f"two increments lead from version {key[0]} to shard {key[2]} of {key[1]}"
                raise Equivocation(reason, b"", manifest.encode())
            news = key not in self._increments
            self._increments[key] = manifest
            return news
        self._check_ref(manifest.ref, manifest)
        news = header.version not in self._full
        self._seen[header.version] = (manifest.content_id, manifest.encode())
        self._full[header.version] = manifest
        return news

    def get(self, version: int) -> Manifest | None:
        return self._full.get(version)

    def increment(self, base: int, target: int, first: int) -> Manifest | None:
        return self._increments.get((base, target, first))

    def versions(self) -> list[int]:
        return sorted(self._full)

    def increments(self) -> list[tuple[int, int, int]]:
        return sorted(self._increments)

    def newest(self) -> Manifest | None:
        return self._full[max(self._full)] if self._full else None

    def next_version(self) -> int:
        """A number that was never used, removed versions included (the first is 1)."""
        return max(self._seen, default=0) + 1

    def standing(self, version: int) -> Standing:
        """For an answer to "do you have version n?": GONE goes with `newest()` as the hint."""
        if version in self._full:
            return Standing.HERE
        if version in self._seen or (self._full and version < min(self._full)):
            return Standing.GONE
        return Standing.UNKNOWN

    def removable(self, leased: Iterable[int], keep: int = KEEP) -> list[Manifest]:
        """What may be removed now, oldest first: versions beyond the `keep` newest on which nobody holds a lease, and
        the increments that lead to a version which goes with them."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the newest version must stay")
        held = set(leased)
        stay = set(self.versions()[-keep:]) | (held & set(self._full))
        gone = [self._full[version] for version in self.versions() if version not in stay]
        useless = [self._increments[key] for key in self.increments() if key[1] not in stay and self._is_old(key[1])]
        return gone + useless

    def remove(self, manifest: Manifest) -> None:
        """Its bytes are gone; its number stays used."""
        header = manifest.header
        if header.base is not None and header.stretch is not None:
            self._increments.pop((header.base.version, header.version, header.stretch.first), None)
        else:
            self._full.pop(manifest.version, None)

    def _is_old(self, version: int) -> bool:
        newest = self.newest()
        return newest is not None and version < newest.version

    def _check_ref(self, ref: Ref, manifest: Manifest) -> None:
        known = self._seen.get(ref.version)
        if known is not None and known[0] != ref.content_id:
            raise Equivocation(
                f"version {ref.version} has content {known[0][:16]}…, and now is said to have {ref.content_id[:16]}…",
                known[1],
                manifest.encode(),
            )


@dataclass(frozen=True, kw_only=True)
class LeaseTerms:
    """How long a version is kept for a slow client, and how much clients may hold back."""

    duration_s: float = 60.0  # a lease ends this long after its last renewal
    lifetime_s_max: float = 3600.0  # and cannot be renewed past this age: a hostile client pins a version no longer
    versions_per_holder_max: int = 2  # the one that it reads from and the one that it fetches
    versions_beyond_max: int = 3  # that stay beyond the newest ones, whoever holds leases on them
    holders_max: int = 10_000


class Leases:
    """Who is in the middle of which version. A holder is an address where that is known (a name is a client's own word,
    and a new one costs nothing), else a name."""

    def __init__(self, terms: LeaseTerms | None = None) -> None:
        self.terms = terms or LeaseTerms()
        self._by_holder: dict[str, dict[int, tuple[float, float]]] = {}  # version -> first granted, ends
        self._pruned_s = -math.inf

    @property
    def holders(self) -> int:
        """Holders that are remembered."""
        return len(self._by_holder)

    def grant(self, version: int, holder: str, now_s: float) -> bool:
        """Grant or renew. False: refused, a limit of the terms is reached."""
        if now_s - self._pruned_s >= self.terms.duration_s:
            self._prune(now_s)
        if holder not in self._by_holder and self.holders >= self.terms.holders_max:
            return False
        mine = self._by_holder.setdefault(holder, {})
        self._drop_ended(mine, now_s)
        if version not in mine:
            if len(mine) >= self.terms.versions_per_holder_max:
                return False
            mine[version] = (now_s, now_s)
        since, _ = mine[version]
        end = min(now_s + self.terms.duration_s, since + self.terms.lifetime_s_max)
        mine[version] = (since, end)
        return end > now_s

    def release(self, version: int, holder: str) -> None:
        mine = self._by_holder.get(holder, {})
        mine.pop(version, None)
        if not mine:
            self._by_holder.pop(holder, None)

    def leased(self, now_s: float) -> set[int]:
        """The versions that somebody is in the middle of."""
        self._prune(now_s)
        return {version for mine in self._by_holder.values() for version, (_, end) in mine.items() if end > now_s}

    def staying(self, versions: Iterable[int], keep: int, now_s: float) -> set[int]:
        """Of these versions, the ones that may not be removed: the `keep` newest, and of the older ones that are leased
        the newest few."""
        order = sorted(versions)
        newest = set(order[-keep:])
        older = sorted(self.leased(now_s) & set(order) - newest)
        return newest | set(older[-self.terms.versions_beyond_max :] if self.terms.versions_beyond_max else ())

    def _prune(self, now_s: float) -> None:
        self._pruned_s = now_s
        for holder in list(self._by_holder):
            self._drop_ended(self._by_holder[holder], now_s)
            if not self._by_holder[holder]:
                del self._by_holder[holder]

    def _drop_ended(self, mine: dict[int, tuple[float, float]], now_s: float) -> None:
        lifetime = self.terms.lifetime_s_max
        for version, (since, end) in list(mine.items()):
            # one that used up its lifetime is remembered as long again, so that it cannot simply be asked for anew
            if now_s >= (end + lifetime if end >= since + lifetime else end):
                del mine[version]


class Holders:
    """Which version each client has, so that an announcement goes to those who lag and to nobody else."""

    def __init__(self, clients_max: int = HOLDERS_MAX) -> None:
        self._clients_max = clients_max
        self._version: dict[str, int] = {}

    def report(self, client: str, version: int) -> None:
        """A client says what it has. The longest-silent client is dropped when there are too many."""
        self._version.pop(client, None)
        if len(self._version) >= self._clients_max:
            self._version.pop(next(iter(self._version)))
        self._version[client] = version

    def drop(self, client: str) -> None:
        self._version.pop(client, None)

    def version(self, client: str) -> int | None:
        return self._version.get(client)

    def lagging(self, newest: int) -> dict[str, int]:
        """Clients below `newest`, with what they have, the furthest behind first."""
        behind = [(version, client) for client, version in self._version.items() if version < newest]
        return {client: version for version, client in sorted(behind)}
