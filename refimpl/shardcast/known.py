"""What a fetching node knows of a run: the versions it holds, the newest, and the increments that lead there."""

from __future__ import annotations

from refimpl.shardcast.document import ManifestError
from refimpl.shardcast.hoard import Hoard, Wanted
from refimpl.shardcast.manifest import Equivocation, Header, Manifest, Verify
from refimpl.shardcast.messages import AskNews, News, tag
from refimpl.shardcast.route import Leg, Speeds, plan_route
from refimpl.shardcast.shelf import Store

OFFERS_MAX = 4096


class Known:
    """Fed with `News`; everything in here is signed by the origin."""

    def __init__(self, store: Store, verify: Verify, origin_key: str) -> None:
        self.store, self.verify, self.origin_key = store, verify, origin_key
        self.held: dict[int, Manifest] = {}  # complete, in the store
        self.newest: Hoard | None = None
        self.increments: dict[tuple[int, int], dict[int, Manifest]] = {}  # by (base, target), then by first shard
        self._between: dict[int, Manifest] = {}  # versions that a chain of them leads through
        self._opened: dict[int, Hoard] = {}
        self._given_up: set[tuple[int, int]] = set()

    @property
    def have(self) -> int:
        return max(self.held, default=-1)

    @property
    def up_to_date(self) -> bool:
        return self.newest is not None and self.newest.published

    def restore(self, manifest: Manifest) -> None:
        """This version is in the store from before."""
        self.held[manifest.version] = manifest
        if self.newest is None or manifest.version > self.newest.header.version:
            self.newest = Hoard.from_manifest(manifest, self.store.shelf(manifest), published=True)

    def question(self, patience_s: float) -> AskNews:
        newest = self.newest
        if newest is None:
            return AskNews(-1, 0, "", -1, (), patience_s)
        final = newest.final.content_id if newest.manifest else ""
        offers = [m for (base, _), each in self.increments.items() if base >= self.have for m in each.values()]
        tags = tuple(tag(manifest.header) for manifest in offers)
        return AskNews(newest.header.version, len(newest.entries), final, self.have, tags, patience_s)

    def learn(self, news: News) -> list[Wanted]:
        """Take what is new; returns shards of the newest version that may be fetched since. Raises ManifestError when
        it is not what the origin signed, Equivocation when that contradicts what it signed before, StoreError when
        there is no room for the version."""
        if news.version > (self.newest.header.version if self.newest is not None else -1):
            hoard = self._begin(news)
            if hoard is None:
                return []
            self.newest = hoard
            self.increments, self._between, self._opened = {}, {}, {}
        newest = self.newest
        if newest is None or news.version != newest.header.version:
            return []
        final = bool(newest.manifest)
        if news.manifest and news.manifest != newest.manifest:
            self._check_final(news.manifest, newest)
        fresh = [] if final and news.manifest else newest.add_entries(news.entries, self.verify)
        if news.manifest and not final:
            fresh += newest.finish(news.manifest, self.verify, self.origin_key)
        self._learn_increments(news)
        return fresh

    def _begin(self, news: News) -> Hoard | None:
        raw = news.opening or news.manifest
        if news.opening:
            hoard = Hoard.opened(news.opening, self.store, self.verify, self.origin_key)
        elif news.manifest:
            manifest = Manifest.decode(news.manifest, self.verify, self.origin_key)
            if manifest.header.version != news.version or manifest.header.is_increment:
                raise ManifestError(f"news of version {news.version} brings the manifest of {manifest.version}")
            hoard = Hoard.from_manifest(manifest, self.store.begin(manifest.header))
        else:
            return None
        if self.newest is not None and hoard.header.run_id != self.newest.header.run_id:
            hoard.shelf.abandon()
            raise ManifestError(f"news of run {hoard.header.run_id!r}, this node follows {self.newest.header.run_id!r}")
        if self.newest is not None and hoard.header.version <= self.newest.header.version:
            return None  # an old opening under a new number: stale
        before = hoard.header.previous
        if before is not None and before.version in self.held and self.held[before.version].ref != before:
            hoard.shelf.abandon()
            raise two_contents(self.held[before.version], before.content_id, raw)
        return hoard

    def _check_final(self, raw: bytes, newest: Hoard) -> None:
        """Raises Equivocation when this manifest gives the newest version another content than is here, ManifestError
        when it is of another version."""
        manifest, header = Manifest.decode(raw, self.verify, self.origin_key), newest.header
        if manifest.header.is_increment or (manifest.header.run_id, manifest.version) != (
            header.run_id,
            header.version,
        ):
            raise ManifestError(f"news of version {header.version} brings the manifest of {manifest.version}")
        if newest.manifest and newest.final.ref != manifest.ref:
            raise two_contents(newest.final, manifest.content_id, raw)

    def _learn_increments(self, news: News) -> None:
        for raw in news.between[:OFFERS_MAX]:
            manifest = Manifest.decode(raw, self.verify, self.origin_key)
            self._between[manifest.version] = manifest
        for raw in news.increments[:OFFERS_MAX]:
            manifest = Manifest.decode(raw, self.verify, self.origin_key)
            base, stretch = manifest.header.base, manifest.header.stretch
            if base is not None and stretch is not None:
                self.increments.setdefault((base.version, manifest.version), {})[stretch.first] = manifest

    # -------------------------------------------------------------------------------------------------------- route
    def next_leg(self, speeds: Speeds) -> Leg | None:
        """The increments to fetch now, when they bring us to the newest version before the whole file would."""
        newest = self.newest
        if newest is None or newest.published or not self.held:
            return None
        full = {version: manifest.layout.size_bytes for version, manifest in self._between.items()}
        full[newest.header.version] = _left_bytes(newest)
        sizes = {}
        for base, target in self.increments:
            manifests = self.offers(base, target)
            if manifests and (base, target) not in self._given_up:
                sizes[base, target] = self._size_of_all(target, manifests)
        route = plan_route(self.have, newest.header.version, full, sizes, speeds)
        if route is None or not route.legs or any(leg.base is None for leg in route.legs):
            return None
        return route.legs[0]

    def offers(self, base: int, target: int) -> list[Manifest]:
        """Increments from one version to another that are known by now and fit them, in the order of the shards."""
        return [m for _, m in sorted(self.increments.get((base, target), {}).items()) if self._fits(m)]

    def open_target(self, version: int) -> Hoard:
        """The version that increments lead to, begun or resumed. Raises StoreError."""
        assert self.newest is not None
        if version == self.newest.header.version:
            return self.newest
        if version not in self._opened:
            manifest = self._between[version]
            self._opened[version] = Hoard.from_manifest(manifest, self.store.begin(manifest.header))
        return self._opened[version]

    def give_up_increments(self, base: int, target: int) -> None:
        self._given_up.add((base, target))

    def _header(self, version: int) -> Header | None:
        if self.newest is not None and version == self.newest.header.version:
            return self.newest.header
        manifest = self._between.get(version)
        return None if manifest is None else manifest.header

    def _fits(self, increment: Manifest) -> bool:
        """It starts from what we hold or pass through, and leads to the very version that we know under its number."""
        header = increment.header
        assert header.base is not None and header.target is not None and header.stretch is not None
        base = self.held.get(header.base.version) or self._between.get(header.base.version)
        target = self._header(header.target.version)
        return (
            base is not None
            and target is not None
            and base.ref == header.base
            and target.id == header.target.content_id
            and header.stretch.shards.stop <= target.layout.shard_count
        )

    def _size_of_all(self, target: int, increments: list[Manifest]) -> int:
        """Bytes of these increments and of what comes beside them: more of their like while the target is still being
        cut, whole shards when nothing more will come."""
        header = self._header(target)
        assert header is not None and self.newest is not None
        shards = {shard for m in increments for shard in (m.header.stretch.shards if m.header.stretch else ())}
        made = sum(header.layout.shard_size(shard) for shard in shards)
        size = sum(manifest.layout.size_bytes for manifest in increments)
        if target == self.newest.header.version and not self.newest.manifest:
            return round(size * header.layout.size_bytes / made)
        return size + header.layout.size_bytes - made


def two_contents(here: Manifest, other: str, proof: bytes) -> Equivocation:
    """The origin uses a number for the second time, as one does that has lost its store."""
    return Equivocation(
        f"the origin signed two contents for version {here.version} of run {here.header.run_id!r}: "
        f"{here.content_id[:16]}… is here, {other[:16]}… came now; its versions are to be trusted no more",
        here.encode(),
        proof,
    )


def _left_bytes(hoard: Hoard) -> int:
    layout = hoard.header.layout
    return sum(layout.shard_size(i) - hoard.shelf.received(i) for i in range(layout.shard_count) if i not in hoard.here)
