"""A hash tree over a version's shards: one root names them all, and a short path shows that one shard belongs to it.

The tree is that of RFC 6962 (certificate transparency):

    leaf(d)    = SHA-256(0x00 ‖ d)
    node(l, r) = SHA-256(0x01 ‖ l ‖ r)

Leaves and nodes are hashed under different prefixes, so no inner node can be passed off as a leaf. Odd rule: a node
without a right neighbour moves up unchanged; it is never paired with itself, so two lists of different length never
share a root (the duplication flaw of CVE-2012-2459).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

EMPTY_ROOT = hashlib.sha256(b"").digest()  # RFC 6962's value for no leaves


def leaf(data: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + data).digest()


def node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _level_above(level: Sequence[bytes]) -> list[bytes]:
    pairs = [node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return [*pairs, level[-1]] if len(level) % 2 else pairs


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root over the leaves' data, in order."""
    level = [leaf(data) for data in leaves]
    while len(level) > 1:
        level = _level_above(level)
    return level[0] if level else EMPTY_ROOT


def merkle_path(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """The siblings on the way from leaf `index` to the root, lowest first: at most ceil(log2 n) hashes."""
    if not 0 <= index < len(leaves):
        raise ValueError(f"leaf {index} does not exist among {len(leaves)}")
    level, path = [leaf(data) for data in leaves], []
    while len(level) > 1:
        sibling = index ^ 1
        if sibling < len(level):  # an odd last node moves up alone
            path.append(level[sibling])
        level, index = _level_above(level), index // 2
    return tuple(path)


def path_leads_to(root: bytes, data: bytes, index: int, count: int, path: Sequence[bytes]) -> bool:
    """True when `data` is leaf `index` of `count` under `root`. Any malformed path is simply not one."""
    if not 0 <= index < count:
        return False
    hashed, left = leaf(data), list(path)
    while count > 1:
        if index ^ 1 < count:
            if not left:
                return False
            sibling = left.pop(0)
            hashed = node(sibling, hashed) if index % 2 else node(hashed, sibling)
        index, count = index // 2, (count + 1) // 2
    return not left and hashed == root
