"""The four commands: each puts a role on an HTTP node, with a store on disk, and watches it."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from refimpl.identity import Identity, verify
from refimpl.messages import Message
from refimpl.shardcast.branch import TreeConfig
from refimpl.shardcast.carry import PIECE_BYTES
from refimpl.shardcast.cli.downloads import DownloadCarrier, serve_downloads
from refimpl.shardcast.cli.keys import load_key, load_or_make_key, read_public_key
from refimpl.shardcast.cli.show import Bar, Notes
from refimpl.shardcast.client import Client
from refimpl.shardcast.disk import StoreError, place, read_blocks
from refimpl.shardcast.disk_store import DiskStore, layout_of
from refimpl.shardcast.document import check_name
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.limits import ServingLimits
from refimpl.shardcast.manifest import Manifest
from refimpl.shardcast.messages import Published, PublishOrder, order_bytes
from refimpl.shardcast.origin import Origin
from refimpl.shardcast.puller import Puller, PullerConfig
from refimpl.shardcast.relay import Relay
from refimpl.shardcast.serving import ServingConfig, ShardServer
from refimpl.world import CallError, Refused, Signal
from refimpl.worlds.alone import run_alone
from refimpl.worlds.files import FileReceiver, WrongLength
from refimpl.worlds.http import HttpWorld

LOOK_S = 0.2
"""How often the bar and the patience are looked at."""
NEWEST = "newest"
NEWS_PATIENCE_S = 30.0
ANSWER_TIMEOUT_S = 30.0
"""Of a question for news, beyond the time that it may be held until there are some."""
ORDER_TIMEOUT_S = 86_400.0


def _store(options: argparse.Namespace, counter: Path | None = None) -> DiskStore:
    options.store.mkdir(parents=True, exist_ok=True)
    return DiskStore(
        options.store,
        reserve_bytes=round(options.reserve_gb * 1e9),
        durable=options.durable,
        link=getattr(options, "link", False),
        workers=options.workers or None,
        counter=counter,
    )


def _found(store: DiskStore, key: str, notes: Notes) -> list[Manifest]:
    manifests, problems = store.found(verify, key)
    for problem in problems:
        notes("problem", path=str(problem.path), reason=problem.reason)
    return manifests


def _serving(options: argparse.Namespace) -> ServingConfig:
    rate = options.client_mb_s * 1e6
    limits = ServingLimits(bytes_per_s=rate, burst_bytes=2 * rate, clients_per_address=options.clients_per_address)
    return ServingConfig(keep=options.keep, limits=limits, hold_s=1.0)


def _pulling(options: argparse.Namespace) -> PullerConfig:
    _require_urls("source", options.sources)
    polls = options.poll_s is not None
    return PullerConfig(
        sources=tuple(source.rstrip("/") for source in options.sources),
        origin=options.origin,
        origin_key=read_public_key(options.origin_key or "(--origin-key is missing)"),
        policy=options.policy,
        connections=options.connections,
        piece_bytes=PIECE_BYTES,
        stall_s=options.stall_s,
        increments=not options.full_only,
        news_patience_s=0.0 if polls else NEWS_PATIENCE_S,
        news_timeout_s=ANSWER_TIMEOUT_S + (0.0 if polls else NEWS_PATIENCE_S),
        news_interval_s=options.poll_s if polls else 0.05,
        retry_s=1.0,
    )


def _tree(options: argparse.Namespace) -> TreeConfig | None:
    """A relay without neighbours stays where it was put."""
    if not options.neighbour:
        return None
    _require_urls("neighbour", options.neighbour)
    neighbours = tuple(url.rstrip("/") for url in (*options.sources[1:], *options.neighbour))
    return TreeConfig(neighbours=neighbours, every_s=options.look_s, timeout_s=options.look_s, slots=options.slots)


def _require_urls(what: str, urls: list[str]) -> None:
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{what} {url!r} is no http://HOST:PORT")


def serve_package(world: HttpWorld, server: ShardServer, store: DiskStore, options: argparse.Namespace) -> None:
    """The published package's layout as well, where it is asked for."""
    if options.compat:
        from refimpl.shardcast.cli.package import PackageServer  # compiles BLAKE3

        package = PackageServer(world, server, store.root, options.compat)
        server.on_change = package.look
        package.look()


# ------------------------------------------------------------------------------------------------------------- origin
def run_origin(options: argparse.Namespace) -> int:
    check_name(options.run, "run id")  # it is part of a file's name now
    # beside the key, so that a run whose store was lost uses no number for the second time
    counter: Path | None = options.key.with_name(f"{options.key.name}.{options.run}.version")
    notes = Notes(options.journal, quiet=options.quiet)
    identity = load_or_make_key(options.key)
    if not os.access(options.key.parent, os.W_OK):
        notes("problem", path=str(counter), reason="cannot be written: version numbers are kept in the store only")
        counter = None
    store = _store(options, counter)
    shard_bytes = round(options.shard_mb * 1e6)
    orders = [layout_of(path, shard_bytes) for path in options.paths]  # refuse before anything runs
    found = _found(store, identity.public_key, notes)
    store.tidy()
    made: list[Origin] = []

    def prepare(world: HttpWorld) -> None:
        origin = Origin(
            world, options.run, identity, verify, _serving(options), store, notes, increments=options.increments
        )
        origin.restore(found)
        origin.serve()
        world.serve({PublishOrder: order})
        origin.server.address_of_caller = world.address_of_caller
        serve_downloads(world, origin.server)
        serve_package(world, origin.server, store, options)
        made.append(origin)

    async def order(source: str, message: PublishOrder) -> Message:
        if not verify(identity.public_key, order_bytes(message), message.signature):
            raise Refused("this order is not signed with the origin's key")
        if not store.claim_order(message.number):
            raise Refused("this order was given before")
        try:
            layout, files = layout_of(Path(message.path), shard_bytes)
            manifest = await made[0].publish(layout, files)
        except (ValueError, OSError, StoreError) as error:
            raise Refused(str(error)) from error
        return Published(manifest.version, manifest.content_id, layout.size_bytes)

    async def main(world: HttpWorld, stop: Signal) -> int:
        notes.say(f"origin of run {options.run!r} at {world.url}, key {identity.public_key}")
        held = [m for m in found if not m.header.is_increment and m.header.run_id == options.run]
        done = held_already(held, orders)
        if done is not None:
            notes.say(f"version {done[1].version} is {options.paths[done[0]]} already")
        for layout, files in orders[0 if done is None else done[0] + 1 :]:
            await made[0].publish(layout, files)
        await stop.wait()
        return 0

    return run_alone("origin", main, prepare=prepare, host=options.host, port=options.port, run_seed=0)


def held_already(held: Sequence[Manifest], orders: Sequence[tuple[Layout, list[Path]]]) -> tuple[int, Manifest] | None:
    """The last of these orders that was published before, and as which version: a restart goes on after it, so that
    no older content comes out again as something new."""
    for at in reversed(range(len(orders))):
        for manifest in reversed(held):
            if same_content(manifest, *orders[at]):
                return at, manifest
    return None


def same_content(manifest: Manifest, layout: Layout, files: list[Path]) -> bool:
    """Whether these files are the version already: after a restart nothing is broadcast twice. (When the shard size has
    been changed since, they are another one.)"""
    if manifest.layout != layout:
        return False
    for index, expected in enumerate(manifest.shards_sha256):
        shard = hashlib.sha256()
        for piece in layout.pieces(layout.shard_offset(index), layout.shard_size(index)):
            with open(files[piece.file], "rb") as opened:
                for block in read_blocks(opened.fileno(), piece.offset, piece.size):
                    shard.update(block)
        if shard.digest() != expected:
            return False
    return True


def run_push(options: argparse.Namespace) -> int:
    identity = load_key(options.key)
    layout_of(options.path, 1 << 30)  # says what is wrong with it here, not over there
    unsigned = PublishOrder(str(options.path.resolve()), time.time_ns())
    order = PublishOrder(unsigned.path, unsigned.number, identity.sign(order_bytes(unsigned)))

    async def main(world: HttpWorld, stop: Signal) -> int:
        try:
            done = await world.call(options.origin, order, ORDER_TIMEOUT_S)
        except CallError as error:
            raise ValueError(error.reason) from error
        print(f"version {done.version}, content {done.content_id}, {done.size_bytes} bytes")
        return 0

    return run_alone("push", main, prepare=None, host="", port=0, run_seed=0)


# --------------------------------------------------------------------------------------------------- relay and client
def run_relay(options: argparse.Namespace) -> int:
    store, notes, config = _store(options), Notes(options.journal, quiet=options.quiet), _pulling(options)
    found = _found(store, config.origin_key, notes)
    name = f"relay-{os.urandom(8).hex()}"
    receiver = FileReceiver(name, connections=options.connections, stall_s=options.stall_s)
    made: list[Relay] = []

    def prepare(world: HttpWorld) -> None:
        relay = Relay(
            world, config, _serving(options), store, verify, notes,
            identity=Identity.generate(), carrier=DownloadCarrier(receiver), tree=_tree(options),
        )  # fmt: skip
        relay.restore(found)
        relay.serve()
        relay.server.address_of_caller = world.address_of_caller
        serve_downloads(world, relay.server)
        serve_package(world, relay.server, store, options)
        made.append(relay)

    async def main(world: HttpWorld, stop: Signal) -> int:
        notes.say(f"relay at {world.url}")
        relay, bar = made[0], Bar(options.bar)
        world.spawn(relay.run(), "relay")
        while not await stop.wait(LOOK_S):
            bar.show(relay.puller.hoard)
        bar.close()
        relay.stop()
        receiver.close()
        return 0

    return run_alone(name, main, prepare=prepare, host=options.host, port=options.port, run_seed=0)


def run_package_pull(options: argparse.Namespace) -> int:
    """Our client at the published package's servers."""
    from refimpl.shardcast.cli.package import PackagePuller  # compiles BLAKE3

    if options.out is None:
        raise ValueError("with --compat the file's place is --out; the layout knows no names")
    name = f"client-{os.urandom(8).hex()}"
    receiver = FileReceiver(name, connections=options.connections, stall_s=options.stall_s)

    async def main(world: HttpWorld, stop: Signal) -> int:
        puller = PackagePuller(world, receiver, options.sources, options.out, checksum=options.compat)
        ended, errors = world.signal(), []

        async def work() -> None:
            try:
                done = await puller.pull(*await puller.newest())
                if not options.quiet:
                    print(f"v{done.version}, {done.size_bytes} bytes, checksum {done.checksum}: {options.out}")
            except (CallError, WrongLength, ValueError, StoreError, OSError) as error:
                errors.append(error)
            ended.set()

        world.spawn(work(), "pull")
        try:
            seen, since_s = puller.progress, time.monotonic()
            while not await ended.wait(LOOK_S):
                if stop.is_set():
                    return 1
                if puller.progress != seen:
                    seen, since_s = puller.progress, time.monotonic()
                elif time.monotonic() - since_s > options.patience_s:
                    raise ValueError(f"nothing has come for {options.patience_s:g} s ({puller.trouble})")
        finally:
            receiver.close()
        for error in errors:
            raise ValueError(str(error)) from error
        return 0

    return run_alone(name, main, prepare=None, host="", port=0, run_seed=0)


def run_pull(options: argparse.Namespace) -> int:
    if options.compat:
        return run_package_pull(options)
    store, notes, config = _store(options), Notes(options.journal, quiet=options.quiet), _pulling(options)
    found = _found(store, config.origin_key, notes)
    name = f"client-{os.urandom(8).hex()}"
    receiver = FileReceiver(name, connections=options.connections, stall_s=options.stall_s)
    started_s = time.monotonic()

    def put_out(manifest: Manifest) -> None:
        if options.out is None:
            return
        if len(manifest.layout.names) != 1:
            raise ValueError(f"--out takes one file, this version has {len(manifest.layout.names)}: see STORE/newest")
        place(store.versions.folder(manifest) / manifest.layout.names[0], options.out)

    def show(manifest: Manifest) -> None:
        point_to(store.root, manifest)
        put_out(manifest)
        notes.say(
            f"version {manifest.version}, {manifest.layout.size_bytes} bytes, whole and verified after "
            f"{time.monotonic() - started_s:.2f} s: {store.versions.folder(manifest)}"
        )

    async def main(world: HttpWorld, stop: Signal) -> int:
        last = None if options.follow else options.version
        client = Client(
            world, config, store, verify, last_version=last, journal=notes, keep=options.keep,
            identity=Identity.generate(), carrier=DownloadCarrier(receiver), on_version=show,
        )  # fmt: skip
        client.restore(found)
        held = [manifest for manifest in found if not manifest.header.is_increment]
        if held:
            point_to(store.root, held[-1])
            if options.follow:
                put_out(held[-1])
        notes.say(
            f"asking {', '.join(config.sources)}; version {client.puller.known.have} is here"
            if held
            else f"asking {', '.join(config.sources)}"
        )
        world.spawn(client.run(), "client")
        try:
            code = await _watch(client, stop, options, Bar(options.bar))
            told, have = max(client.puller.answers.values(), default=-1), client.puller.known.have
            if code == 0 and not client.complete:
                put_out(held[-1])  # it was here before
            if code == 0 and told < have:
                notes.say(f"version {have} is newer than what the sources have: {told if told >= 0 else 'nothing'}")
            return code
        finally:
            client.stop()
            receiver.close()

    return run_alone(name, main, prepare=None, host="", port=0, run_seed=0)


async def _watch(client: Client, stop: Signal, options: argparse.Namespace, bar: Bar) -> int:
    """Until it is done, or until there is no hope. Raises ValueError with the reason."""
    puller = client.puller
    seen, since_s = None, time.monotonic()
    while not await stop.wait(LOOK_S):
        bar.show(puller.hoard)
        if client.stopped or _has_all(puller, options):
            bar.close()
            return 0
        if puller.disputed:
            bar.close()
            raise ValueError(f"{puller.disputed}; {_old_version(puller)}")
        if puller.no_room and not options.follow:
            bar.close()
            raise ValueError(f"{puller.trouble}; {_old_version(puller)}")
        progress = puller.progress()
        if progress != seen:
            seen, since_s = progress, time.monotonic()
        elif not options.follow and time.monotonic() - since_s > options.patience_s:
            bar.close()
            raise ValueError(
                f"nothing has come for {options.patience_s:g} s ({puller.trouble}); {_old_version(puller)}"
            )
    bar.close()
    return 1


def _has_all(puller: Puller, options: argparse.Namespace) -> bool:
    """Without --follow: what the sources call newest is here (all of them have answered or failed)."""
    return not options.follow and puller.asked and puller.known.up_to_date and puller.known.have >= options.version


def _old_version(puller: Puller) -> str:
    have = puller.known.have
    return f"version {have} is here as before" if have >= 0 else "nothing was changed"


def point_to(root: Path, manifest: Manifest) -> None:
    """`root/newest` names this version from now on, in one step."""
    hidden = root / f".{NEWEST}.{os.getpid()}"
    hidden.unlink(missing_ok=True)
    os.symlink(manifest.label, hidden)
    os.replace(hidden, root / NEWEST)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "origin": run_origin,
    "relay": run_relay,
    "pull": run_pull,
    "push": run_push,
}
