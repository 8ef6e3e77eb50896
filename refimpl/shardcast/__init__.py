"""SHARDCAST: new weights reach every node, whole, checked, by the best road.

Cores (no waiting, no clock, no chance of their own), in reading order:

1. `manifest.py`  what a version is: signed header, provisional shard entries, final manifest; `merkle.py` its root
2. `versions.py`  which versions exist, in which order, which may be removed; leases
3. `store.py`     a version on disk: assembled beside its final path, resumed by shard and byte, published by rename
4. `choice.py`    which relay to ask for a shard: the original's rule, and expected finish time
5. `fetch.py`     which shard to ask for next, when to try again, when to ask twice
6. `delta.py`     the lossless increment between two versions (`delta_codec.py`: its inner loops)
7. `route.py`     increments or the whole file: whichever arrives first
8. `compat.py`    the published package's file layout (`blake3.py`: its checksum)
"""
