"""SHARDCAST: new weights reach every node, whole, checked, by the best road.

Cores (no waiting, no clock, no chance of their own), in reading order:

1. `manifest.py`   what a version is: signed opening, provisional shard entries, final manifest (`layout.py`: how files
                   are cut; `merkle.py`: the root; `document.py`: canonical JSON, read as hostile input)
2. `versions.py`   which versions exist, in which order, which may be removed; leases; who lags
3. `shelf.py`      where shards lie, as the roles see it; in memory for the simulator, or on disk: `disk_store.py`,
                   `store.py` (`assembly.py`: written in place, resumed by shard and byte, published by rename)
4. `choice.py`     which relay to ask for a shard: the published rule, and expected finish time
5. `fetch.py`      which shard next, when to try again, when to ask twice
6. `delta.py`      the lossless increment between two versions (`tensors.py`, `delta_sparse.py`, `delta_codec.py`: what
                   is compared, and how it is coded; `increment.py`: from the store, into the store)
7. `route.py`      increments or the whole file: whichever arrives first
8. `topology.py`   below which parent a relay hangs (`arrivals.py`: how fast shards come from it); `limits.py` what one
                   client, or one address, may take
9. `compat.py`     the published package's file layout (`blake3.py`: its checksum)
10. `hoard.py`     what a node holds of one version; `job.py`: what it is fetching; `known.py`: what it knows of a run;
                   `carry.py`: how bytes travel

Roles: `origin.py`, `relay.py` and `client.py`, of `serving.py`, `puller.py` and `branch.py` (relays measure each other
and move); they speak `messages.py`.
`cli/`: the same as commands, with files, keys and plain HTTP downloads (`python -m refimpl.shardcast --help`).
"""
