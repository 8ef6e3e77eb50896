"""BLAKE3, because the published package's index carries it and no library that this project depends on has it.

Used by the compatibility mode alone. The hash is a binary tree over chunks of 1024 bytes (the BLAKE3 paper, O'Connor et
al. 2020, section 2): each chunk is compressed block by block from the key words, parents compress two chaining values,
and the root is compressed with its own flag. Sixteen chunks are hashed side by side, one per lane, in loops that the
compiler turns into vector instructions.

Shapes: L lanes; state and message are uint32 [16, L].
"""

from __future__ import annotations

import numpy as np
from numba import njit

u32 = np.uint32

_IV = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32
)
_PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_CHUNK_BYTES, _BLOCK_BYTES = 1024, 64
_LANES = 16
_DEPTH_MAX = 54  # 2^64 bytes


def _schedule() -> np.ndarray:
    """int64 [7, 16]: which message word each round takes where."""
    rows = [list(range(16))]
    for _ in range(6):
        rows.append([rows[-1][i] for i in _PERMUTATION])
    return np.array(rows)


_SCHEDULE = _schedule()
# the four words that each of the eight mixing steps of a round works on: columns, then diagonals
_MIX = np.array(
    [[i, 4 + i, 8 + i, 12 + i] for i in range(4)]
    + [[i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4] for i in range(4)]
)


@njit(cache=True, nogil=True)
def _compress(v: np.ndarray, m: np.ndarray, lanes: int) -> None:
    """Seven rounds over the state `v` uint32 [16, L] with the message `m` uint32 [16, L]; the chaining value ends up in
    the first eight rows."""
    for r in range(7):
        for g in range(8):
            a, b, c, d = v[_MIX[g, 0]], v[_MIX[g, 1]], v[_MIX[g, 2]], v[_MIX[g, 3]]
            x, y = m[_SCHEDULE[r, 2 * g]], m[_SCHEDULE[r, 2 * g + 1]]
            for i in range(lanes):
                a_, b_, c_, d_ = a[i], b[i], c[i], d[i]
                a_ = u32(a_ + b_ + x[i])  # numba adds in 64 bits
                d_ = u32(d_ ^ a_)
                d_ = u32((d_ >> u32(16)) | (d_ << u32(16)))
                c_ = u32(c_ + d_)
                b_ = u32(b_ ^ c_)
                b_ = u32((b_ >> u32(12)) | (b_ << u32(20)))
                a_ = u32(a_ + b_ + y[i])
                d_ = u32(d_ ^ a_)
                d_ = u32((d_ >> u32(8)) | (d_ << u32(24)))
                c_ = u32(c_ + d_)
                b_ = u32(b_ ^ c_)
                b_ = u32((b_ >> u32(7)) | (b_ << u32(25)))
                a[i], b[i], c[i], d[i] = a_, b_, c_, d_
    for w in range(8):
        for i in range(lanes):
            v[w, i] ^= v[w + 8, i]


@njit(cache=True, nogil=True)
def _set_up(v: np.ndarray, lane: int, counter: np.uint64, length: int, flags: int) -> None:
    """Rows 8 to 15 of one lane; the chaining value in rows 0 to 7 stays."""
    for w in range(4):
        v[8 + w, lane] = _IV[w]
    v[12, lane] = np.uint32(counter & np.uint64(0xFFFFFFFF))
    v[13, lane] = np.uint32(counter >> np.uint64(32))
    v[14, lane] = np.uint32(length)
    v[15, lane] = np.uint32(flags)


@njit(cache=True, nogil=True)
def _parent(left: np.ndarray, right: np.ndarray, flags: int, v: np.ndarray, m: np.ndarray, out: np.ndarray) -> None:
    """uint32 [8], uint32 [8] -> uint32 [8] (`out` may be one of them). `v`, `m`: room for one lane."""
    for w in range(8):
        v[w, 0] = _IV[w]
        m[w, 0], m[8 + w, 0] = left[w], right[w]
    _set_up(v, 0, np.uint64(0), _BLOCK_BYTES, _PARENT | flags)
    _compress(v, m, 1)
    for w in range(8):
        out[w] = v[w, 0]


@njit(cache=True, nogil=True)
def _absorb(words: np.ndarray, chunks: int, counter: int, stack: np.ndarray, depth: int) -> int:
    """Whole chunks (uint32 [256 · chunks]) onto the stack of finished subtrees (uint32 [54, 8]); returns its depth."""
    v, m = np.empty((16, _LANES), np.uint32), np.empty((16, _LANES), np.uint32)
    v1, m1 = np.empty((16, 1), np.uint32), np.empty((16, 1), np.uint32)
    done = 0
    while done < chunks:
        lanes = min(_LANES, chunks - done)
        for w in range(8):
            v[w, :] = _IV[w]
        for block in range(16):
            flags = (_CHUNK_START if block == 0 else 0) | (_CHUNK_END if block == 15 else 0)
            for lane in range(lanes):
                _set_up(v, lane, np.uint64(counter + done + lane), _BLOCK_BYTES, flags)
                at = (done + lane) * 256 + block * 16
                for w in range(16):
                    m[w, lane] = words[at + w]
            _compress(v, m, _LANES)
        for lane in range(lanes):
            stack[depth] = v[:8, lane]
            depth += 1
            finished = counter + done + lane + 1
            while finished & 1 == 0:  # two subtrees of one size are one of the next
                _parent(stack[depth - 2], stack[depth - 1], 0, v1, m1, stack[depth - 2])
                depth -= 1
                finished >>= 1
        done += lanes
    return depth


@njit(cache=True, nogil=True)
def _finish(tail: np.ndarray, length: int, counter: int, stack: np.ndarray, depth: int) -> np.ndarray:
    """The last chunk (uint32 [256], `length` bytes of it are meant) and all subtrees -> uint32 [8]."""
    v, m = np.empty((16, 1), np.uint32), np.empty((16, 1), np.uint32)
    value = _IV.copy()
    blocks = max(1, (length + _BLOCK_BYTES - 1) // _BLOCK_BYTES)
    for block in range(blocks):
        last = block == blocks - 1
        flags = (_CHUNK_START if block == 0 else 0) | (_CHUNK_END if last else 0)
        flags |= _ROOT if last and depth == 0 else 0
        for w in range(8):
            v[w, 0] = value[w]
        for w in range(16):
            m[w, 0] = tail[block * 16 + w]
        _set_up(v, 0, np.uint64(counter), length - block * _BLOCK_BYTES if last else _BLOCK_BYTES, flags)
        _compress(v, m, 1)
        for w in range(8):
            value[w] = v[w, 0]
    while depth:
        depth -= 1
        _parent(stack[depth], value, 0 if depth else _ROOT, v, m, value)
    return value


class Blake3:
    """hashlib's interface: `update`, `digest`, `hexdigest`."""

    def __init__(self, data: bytes | bytearray | memoryview = b"") -> None:
        self._stack = np.zeros((_DEPTH_MAX + 1, 8), np.uint32)
        self._depth = self._chunks = 0
        self._tail = b""  # the last chunk is kept back: it may be the root
        self.update(data)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        if self._tail:
            taken = min(len(view), _CHUNK_BYTES - len(self._tail))
            self._tail += view[:taken]
            view = view[taken:]
            if not view:
                return
            self._absorb(memoryview(self._tail))
            self._tail = b""
        whole = max(0, (len(view) - 1) // _CHUNK_BYTES) * _CHUNK_BYTES
        self._absorb(view[:whole])
        self._tail = bytes(view[whole:])

    def digest(self) -> bytes:
        tail = np.frombuffer(self._tail.ljust(_CHUNK_BYTES, b"\0"), "<u4").astype(np.uint32)
        value: bytes = _finish(tail, len(self._tail), self._chunks, self._stack, self._depth).astype("<u4").tobytes()
        return value

    def hexdigest(self) -> str:
        return self.digest().hex()

    def _absorb(self, chunks: memoryview) -> None:
        if chunks:
            words = np.require(np.frombuffer(chunks, "<u4"), requirements="A")
            words.flags.writeable = False
            count = len(chunks) // _CHUNK_BYTES
            self._depth = _absorb(words, count, self._chunks, self._stack, self._depth)
            self._chunks += count
