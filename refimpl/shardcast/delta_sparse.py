"""The sparse coding of an increment: which 16-bit weights changed, and by how much, close to the entropy.

After a small training step most bf16 weights keep their bits; nearly all others move by one unit in the last place (the
bit pattern goes up or down by one). A weight's chance to flip is about |movement| / (its unit in the last place), so it
doubles with each smaller exponent. Hence the weights are dealt into classes by the exponent that they had *before*
(which the receiver knows). For every class, in the order of the weights:

    gap    unchanged weights of the class until its next change            (Rice code)
    sign   of the step, new − old mod 2^16 as a signed number              (1 bit)
    calm   steps of size 1 in the class until its next larger step         (Rice code)
    size   of a larger step, less 1: its highest bit's place               (Rice code)
           and the bits below it                                           (plain)

Gaps of one class are nearly geometric, for which a Rice code is within a few hundredths of a bit of the best. Its
parameter k follows a running mean of the values, on both sides alike, so rows that train and rows that rest each get
their own. The receiver reads what it needs next at every change, so all classes share one stream of bits:

    payload = mask of the classes with changes (4 bytes), k of their first gap (a byte each), bits (words of 8 bytes)

Shapes: n weights in a chunk; C classes; m changes.
"""

from __future__ import annotations

import struct

import numpy as np
from numba import njit

from refimpl.shardcast.document import DeltaError

CLASSES = 24
_MASK = struct.Struct("<I")  # bit c: class c has changes
_UNARY_MAX = 20  # a longer unary part is an escape: 32 plain bits follow
_MEAN_SHIFT = 5  # the running mean forgets over 2^5 values
_PAD_WORDS = 8  # one change reads less than 3 (20 + 32) + 1 bits
_FAR = 1 << 62  # no change in this class


def exponent_classes(dtype: str) -> np.ndarray:
    """uint8 [512]: the class of a 16-bit element by its upper nine bits. Class 0: |x| >= 1; class c: |x| about 2^-c."""
    upper = np.arange(512)
    if dtype == "BF16":
        exponent = (upper & 0xFF) - 127  # sign, 8 bits of exponent
    elif dtype == "F16":
        exponent = ((upper >> 3) & 0x1F) - 15  # sign, 5 bits of exponent, 3 of the fraction
    else:
        return np.zeros(512, np.uint8)
    return np.clip(-exponent, 0, CLASSES - 1).astype(np.uint8)


def encode_sparse(old: np.ndarray, new: np.ndarray, class_of: np.ndarray) -> bytes | None:
    """uint16 [n], uint16 [n] -> payload; None when it would not be smaller than the weights themselves."""
    classes, gaps = np.empty(old.size, np.uint8), np.empty(old.size, np.uint32)
    steps, after = np.empty(old.size, np.int16), np.zeros(CLASSES, np.uint32)
    count = _find_changes(old, new, class_of, classes, gaps, steps, after)
    classes, gaps, steps = classes[:count], gaps[:count], steps[:count]
    calm = np.empty(count, np.uint32)
    first_gap, first_calm = _look_ahead(classes, gaps, steps, after, calm)
    changed = np.bincount(classes, minlength=CLASSES)
    mean_gap = np.bincount(classes, weights=gaps, minlength=CLASSES) / np.maximum(changed, 1)
    first_k = np.where(mean_gap >= 2, np.log2(np.maximum(mean_gap, 1) * 0.69).round(), 0).astype(np.uint8)
    words = np.zeros(old.size // 4 + _PAD_WORDS, np.uint64)  # no longer than the weights: it gives up before
    length = _write(classes, gaps, steps, calm, first_gap, first_calm, first_k, words)
    if length < 0:
        return None
    present = np.flatnonzero(changed)
    mask = int(sum(1 << int(c) for c in present))
    return _MASK.pack(mask) + first_k[present].tobytes() + words[:length].astype("<u8").tobytes()


def decode_sparse(old: np.ndarray, payload: memoryview, class_of: np.ndarray) -> np.ndarray:
    """uint16 [n], payload -> uint16 [n]. Raises DeltaError; allocates no more than the payload and the result."""
    if len(payload) < _MASK.size:
        raise DeltaError("an increment's chunk breaks off in its mask")
    mask = _MASK.unpack_from(payload)[0]
    if mask >> CLASSES:
        raise DeltaError(f"an increment's chunk names a class beyond {CLASSES - 1}")
    present = [c for c in range(CLASSES) if mask >> c & 1]
    bits = payload[_MASK.size + len(present) :]
    if len(payload) < _MASK.size + len(present) or len(bits) % 8:
        raise DeltaError("an increment's chunk breaks off in its bits")
    first_k = np.zeros(CLASSES, np.uint8)
    first_k[present] = np.frombuffer(payload, np.uint8, len(present), _MASK.size)
    if first_k.max() > 31:
        raise DeltaError(f"an increment's chunk has a Rice parameter of {first_k.max()}, at most 31 was expected")
    words = np.zeros(len(bits) // 8 + _PAD_WORDS, np.uint64)
    words[: len(bits) // 8] = np.frombuffer(bits, "<u8")
    new = np.empty_like(old)
    if not _read(old, class_of, np.uint32(mask), first_k, words, len(bits) // 8, new):
        raise DeltaError("an increment's chunk does not fit its base")
    return new


# ------------------------------------------------------------------------------------------------------------- encoder
@njit(cache=True, nogil=True)
def _find_changes(
    old: np.ndarray,  # uint16 [n]
    new: np.ndarray,  # uint16 [n]
    class_of: np.ndarray,  # uint8 [512]
    classes: np.ndarray,  # out, uint8 [n]: of the i-th change
    gaps: np.ndarray,  # out, uint32 [n]: unchanged ones of its class before it
    steps: np.ndarray,  # out, int16 [n]
    after: np.ndarray,  # out, uint32 [C]: unchanged ones after the last change
) -> int:
    count = 0
    for i in range(old.size):
        c = class_of[old[i] >> 7]
        if old[i] == new[i]:
            after[c] += np.uint32(1)
        else:
            classes[count] = c
            gaps[count] = after[c]
            steps[count] = np.int16(np.uint16(new[i] - old[i]))
            after[c] = np.uint32(0)
            count += 1
    return count


@njit(cache=True, nogil=True)
def _look_ahead(
    classes: np.ndarray,  # uint8 [m]
    gaps: np.ndarray,  # uint32 [m]: in: before each change; out: after it, until the next one of its class
    steps: np.ndarray,  # int16 [m]
    after: np.ndarray,  # uint32 [C]
    calm: np.ndarray,  # out, uint32 [m]: steps of size 1 after it, until the next larger one of its class
) -> tuple[np.ndarray, np.ndarray]:
    """The decoder asks for what comes next, so the encoder goes backwards once. Gives first gap and calm by class."""
    next_gap, next_calm = after.copy(), np.zeros(CLASSES, np.uint32)
    for i in range(classes.size - 1, -1, -1):
        c = classes[i]
        before = gaps[i]
        gaps[i], calm[i] = next_gap[c], next_calm[c]
        next_gap[c] = before
        next_calm[c] = next_calm[c] + np.uint32(1) if abs(np.int32(steps[i])) == 1 else np.uint32(0)
    return next_gap, next_calm


@njit(cache=True, nogil=True)
def _put(words: np.ndarray, at: int, value: np.uint64, bits: int) -> int:
    """Append `bits` (at most 53) low bits of `value`; returns the new position."""
    word, shift = at >> 6, np.uint64(at & 63)
    words[word] |= value << shift
    if (at & 63) + bits > 64:
        words[word + 1] |= value >> (np.uint64(64) - shift)
    return at + bits


@njit(cache=True, nogil=True)
def _put_rice(words: np.ndarray, at: int, value: np.uint32, k: np.int64) -> int:
    """quotient ones, a zero, k bits of remainder; or the escape: _UNARY_MAX ones, 32 bits."""
    quotient = np.int64(value) >> k
    if quotient >= _UNARY_MAX:
        at = _put(words, at, np.uint64((1 << _UNARY_MAX) - 1), _UNARY_MAX)
        return _put(words, at, np.uint64(value), 32)
    at = _put(words, at, np.uint64((1 << quotient) - 1), int(quotient) + 1)
    return _put(words, at, np.uint64(value) & np.uint64((1 << k) - 1), int(k))


@njit(cache=True, nogil=True)
def _learn(mean: np.ndarray, k: np.ndarray, c: int, value: np.int64) -> None:
    """Running mean (times 2^_MEAN_SHIFT; the first value sets it) and the k that suits it: 2^k about 0.69 mean."""
    if mean[c] < 0:
        mean[c] = value << _MEAN_SHIFT
    else:
        mean[c] += value - (mean[c] >> _MEAN_SHIFT)
    suits = (mean[c] * 31) >> (_MEAN_SHIFT + 5)  # 0.69 √2 mean: the nearest power of two, by rounding down
    while k[c] < 31 and (np.int64(2) << k[c]) <= suits:
        k[c] += 1
    while k[c] > 0 and (np.int64(1) << k[c]) > suits:
        k[c] -= 1


@njit(cache=True, nogil=True)
def _write(
    classes: np.ndarray,  # uint8 [m]
    gaps: np.ndarray,  # uint32 [m]: after each change
    steps: np.ndarray,  # int16 [m]
    calm: np.ndarray,  # uint32 [m]: after each change
    first_gap: np.ndarray,  # uint32 [C]
    first_calm: np.ndarray,  # uint32 [C]
    first_k: np.ndarray,  # uint8 [C]
    words: np.ndarray,  # out, uint64: zeros
) -> int:
    """Words written, or −1 when they do not suffice."""
    limit = 64 * (words.size - _PAD_WORDS)
    k = np.zeros((3, CLASSES), np.int64)  # of gap, calm, size
    mean = np.full((3, CLASSES), -1, np.int64)
    k[0, :] = first_k
    begun = np.zeros(CLASSES, np.bool_)
    for i in range(classes.size):
        begun[classes[i]] = True
    at = 0
    for c in range(CLASSES):
        if begun[c]:
            at = _put_rice(words, at, first_gap[c], k[0, c])
            at = _put_rice(words, at, first_calm[c], k[1, c])
        if at > limit:
            return -1
    for i in range(classes.size):
        c, step = classes[i], np.int64(steps[i])
        size = abs(step)
        at = _put(words, at, np.uint64(1 if step < 0 else 0), 1)
        if size > 1:
            place = 0
            while size - 1 >= np.int64(2) << place:
                place += 1
            at = _put_rice(words, at, np.uint32(place), k[2, c])
            at = _put(words, at, np.uint64((size - 1) ^ (np.int64(1) << place)), place)
            _learn(mean[2], k[2], c, np.int64(place))
            at = _put_rice(words, at, calm[i], k[1, c])
            _learn(mean[1], k[1], c, np.int64(calm[i]))
        at = _put_rice(words, at, gaps[i], k[0, c])
        _learn(mean[0], k[0], c, np.int64(gaps[i]))
        if at > limit:
            return -1
    return (at + 63) >> 6


# ------------------------------------------------------------------------------------------------------------- decoder
@njit(cache=True, nogil=True)
def _window(words: np.ndarray, at: int) -> np.uint64:
    """The 64 bits from bit `at` on."""
    word, shift = at >> 6, np.uint64(at & 63)
    low = words[word] >> shift
    return low | (words[word + 1] << (np.uint64(64) - shift)) if shift else low


@njit(cache=True, nogil=True)
def _take_rice(words: np.ndarray, at: int, k: np.int64) -> tuple[np.int64, int]:
    """(value, new position). Reads at most _UNARY_MAX + 32 bits."""
    window = _window(words, at)
    quotient = np.int64(0)
    while quotient < _UNARY_MAX and (window >> np.uint64(quotient)) & np.uint64(1):
        quotient += 1
    if quotient == _UNARY_MAX:
        at += _UNARY_MAX
        return np.int64(_window(words, at) & np.uint64(0xFFFFFFFF)), at + 32
    at += int(quotient) + 1
    return (quotient << k) | np.int64(_window(words, at) & np.uint64((1 << k) - 1)), at + int(k)


@njit(cache=True, nogil=True)
def _read(
    old: np.ndarray,  # uint16 [n]
    class_of: np.ndarray,  # uint8 [512]
    mask: np.uint32,
    first_k: np.ndarray,  # uint8 [C]
    words: np.ndarray,  # uint64 [length + _PAD_WORDS]
    length: int,
    new: np.ndarray,  # out, uint16 [n]
) -> bool:
    """False when the bits are not what an encoder would have made of this base. Never reads outside of `words`."""
    limit = 64 * length
    k = np.zeros((3, CLASSES), np.int64)
    mean = np.full((3, CLASSES), -1, np.int64)
    k[0, :] = first_k
    left, calm, at = np.full(CLASSES, _FAR, np.int64), np.zeros(CLASSES, np.int64), 0
    for c in range(CLASSES):
        if mask >> np.uint32(c) & np.uint32(1):
            left[c], at = _take_rice(words, at, k[0, c])
            calm[c], at = _take_rice(words, at, k[1, c])
            if at > limit:
                return False
    for i in range(old.size):
        c = class_of[old[i] >> 7]
        if left[c] > 0:
            left[c] -= 1
            new[i] = old[i]
            continue
        negative = _window(words, at) & np.uint64(1)
        at += 1
        size = np.int64(1)
        if calm[c] > 0:
            calm[c] -= 1
        else:
            place, at = _take_rice(words, at, k[2, c])
            if place > 15:
                return False
            size = 1 + ((np.int64(1) << place) | np.int64(_window(words, at) & np.uint64((1 << place) - 1)))
            at += int(place)
            _learn(mean[2], k[2], c, place)
            calm[c], at = _take_rice(words, at, k[1, c])
            _learn(mean[1], k[1], c, calm[c])
        new[i] = np.uint16((np.int64(old[i]) + (-size if negative else size)) & 0xFFFF)
        left[c], at = _take_rice(words, at, k[0, c])
        _learn(mean[0], k[0], c, left[c])
        if at > limit:
            return False
    for c in range(CLASSES):  # everything that was announced has come
        if calm[c] != 0 or (left[c] != 0 and left[c] < _FAR - old.size):
            return False
    return (at + 63) >> 6 == length
