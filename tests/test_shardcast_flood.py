"""A flooder that changes its name with every request, over real HTTP: it shares what its address may take."""

from __future__ import annotations

import asyncio
import http.client
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from refimpl.identity import verify
from refimpl.shardcast.cli.downloads import PREFIX, serve_downloads
from refimpl.shardcast.disk_store import DiskStore, layout_of
from refimpl.shardcast.limits import ServingLimits
from refimpl.shardcast.messages import AskShard
from refimpl.shardcast.origin import Origin
from refimpl.shardcast.serving import ServingConfig
from refimpl.world import CallError, Refused
from refimpl.worlds.http import SOURCE_HEADER, HttpFabric, HttpWorld
from tests.shardcast_tree import KEY

SHARD, NAMES = 100_000, 30
# one client may have 2 transfers, one address 4; after a burst of 2 shards (4 for the address) a shard takes 2 s
LIMITS = ServingLimits(bytes_per_s=25_000, burst_bytes=2 * SHARD, transfers_per_client=2, clients_per_address=2.0)


def get(url: str, path: str, name: str, address: str) -> tuple[int, int, float]:
    """(status, bytes, seconds) of one download by `name` from `address`."""
    where, started_s = urlsplit(url), time.monotonic()
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, source_address=(address, 0))
    connection.request("GET", path, headers={SOURCE_HEADER: name, "Range": f"bytes=0-{SHARD - 1}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, len(body), time.monotonic() - started_s


def test_made_up_names_share_what_their_address_may_take(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(3 * SHARD))
    fabric = HttpFabric(run_seed=1)
    world = fabric.node("origin")
    origin = Origin(world, "run", KEY, verify, ServingConfig(limits=LIMITS), DiskStore(tmp_path / "o"))
    origin.server.address_of_caller = world.address_of_caller
    origin.serve()
    serve_downloads(world, origin.server)
    callers = [fabric.node(f"caller {i}") for i in range(NAMES)]

    async def call(caller: HttpWorld, header_id: str) -> bool:
        try:
            await caller.call("origin", AskShard(header_id, 0, 0, SHARD), 60.0)
        except Refused as error:
            assert "your address" in error.reason
            return False
        except CallError as error:
            raise AssertionError(error.reason) from error
        return True

    async def main() -> None:
        manifest = await origin.publish(*layout_of(path, SHARD))
        shard = f"{PREFIX}/{manifest.header.id}/0"
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(NAMES + 1) as threads:
            flood = [
                loop.run_in_executor(threads, get, world.url, shard, f"name {i}", "127.0.0.1") for i in range(NAMES)
            ]
            await world.sleep(0.5)
            # another address is served at once, while the flood waits
            status, size, took_s = await loop.run_in_executor(threads, get, world.url, shard, "name 3", "127.0.0.2")
            assert (status, size) == (206, SHARD) and took_s < 1.0
            answers = await asyncio.gather(*flood)
        served = [answer for answer in answers if answer[0] == 206]
        assert {answer[0] for answer in answers} == {206, 429}
        # four at once; a place that is free again may be taken by a request that came late
        assert 4 <= len(served) <= 10 and all(size == SHARD for _, size, _ in served)

        # the same through the port's calls, which name their sender themselves as well
        taken = await asyncio.gather(*(call(caller, manifest.header.id) for caller in callers))
        assert 1 <= sum(taken) <= 10

    fabric.run(main())
