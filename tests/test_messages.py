"""Frames: exact, canonical, bounded; bytes from a peer are refused with a reason and nothing else happens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.messages import (
    DTYPES,
    FRAME_BYTES_MAX,
    PREFIX,
    Assignment,
    BadMessage,
    Blob,
    Message,
    Submission,
    Verdict,
    decode,
    encode,
    frame_length,
    size_bytes,
    wire,
)


@dataclass(frozen=True)
class Inner:
    label: str
    weight: float


@wire
@dataclass(frozen=True)
class Everything(Message):
    count: int
    ratio: float
    flag: bool
    text: str
    raw: bytes
    tensor: np.ndarray
    numbers: tuple[int, ...]
    words: tuple[str, ...]
    inner: Inner
    maybe: Inner | None
    blob: Blob


def sample(rng: random.Random) -> Everything:
    numbers = np.random.default_rng(rng.randrange(2**32))
    shape = tuple(rng.randrange(4) for _ in range(rng.randrange(4)))
    raw = numbers.bytes(rng.randrange(50))
    return Everything(
        count=rng.randrange(-(2**63), 2**63),
        ratio=rng.uniform(-1e300, 1e300),
        flag=rng.random() < 0.5,
        text=rng.choice(["", "plain", "ünï", "日本"]),
        raw=numbers.bytes(rng.randrange(50)),
        tensor=(numbers.random(shape) * 100).astype(rng.choice(DTYPES)),
        numbers=tuple(rng.randrange(100) for _ in range(rng.randrange(5))),
        words=tuple(rng.choice(["a", "é"]) for _ in range(rng.randrange(5))),
        inner=Inner("i", 0.5),
        maybe=None if rng.random() < 0.5 else Inner("m", -0.0),
        blob=Blob(len(raw), "id", raw),
    )


SUBMISSION = Submission(
    "ab" * 32, 1, 2, 3, 4, "sum", np.arange(48, dtype=np.int32), np.zeros(48, np.float32), (b"x" * 258, b"y"), b"s" * 64
)


def test_what_is_sent_is_what_arrives_and_its_size_was_known() -> None:
    for seed in range(300):
        message = sample(random.Random(seed))
        frame = encode(message)
        assert len(frame) == size_bytes(message) == frame_length(frame[: PREFIX.size])
        back = decode(frame)
        assert isinstance(back, Everything)
        np.testing.assert_array_equal(back.tensor, message.tensor)
        assert back.tensor.dtype == message.tensor.dtype and back.tensor.shape == message.tensor.shape
        for field in ("count", "ratio", "flag", "text", "raw", "numbers", "words", "inner", "maybe", "blob"):
            assert getattr(back, field) == getattr(message, field), field
        assert encode(back) == frame  # one message, one frame


def test_tensors_arrive_read_only_and_transposed_ones_are_laid_out_anew() -> None:
    values = np.arange(6, dtype=np.int64).reshape(2, 3).T
    message = Assignment(0, 1, values, 5)
    back = decode(encode(message))
    assert isinstance(back, Assignment)
    np.testing.assert_array_equal(back.problem_ids, values)
    with pytest.raises(ValueError, match="read-only"):
        back.problem_ids[0, 0] = 1


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "a frame starts with 16 bytes, only 0 came"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame starts with b'ARM1'"),
        (PREFIX.pack(b"ARM1", 1 << 21, 0), "header of 2097152 bytes"),
        (PREFIX.pack(b"ARM1", 4, FRAME_BYTES_MAX), "frame of 268435476 bytes, at most 268435456"),
        (PREFIX.pack(b"ARM1", 4, 2**64 - 1), "at most"),
        (PREFIX.pack(b"ARM1", 8, 0) + b"\x04\0\0\0None", "unknown message type 'None'"),
        (PREFIX.pack(b"ARM1", 8, 0) + b"\xff\xff\xff\xffNone", "header ends inside message type"),
        (PREFIX.pack(b"ARM1", 6, 0) + b"\x02\0\0\0\xff\xfe", "message type is not UTF-8"),
        (encode(Verdict("id", True, "ok", "fine"))[:-1], "its prefix says"),
        (encode(Verdict("id", True, "ok", "fine")) + b"!", "its prefix says"),
    ],
)
def test_a_bad_frame_is_refused_with_a_reason(frame: bytes, reason: str) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(frame)
    assert reason in str(caught.value)


def rebuilt(header: bytes, body: bytes = b"") -> bytes:
    return PREFIX.pack(b"ARM1", len(header), len(body)) + header + body


def test_left_over_bytes_and_wrong_flags_and_non_finite_numbers_are_refused() -> None:
    frame = encode(Verdict("id", True, "ok", "fine"))
    header = frame[PREFIX.size :]
    with pytest.raises(BadMessage, match="leaves 3 bytes unread"):
        decode(rebuilt(header + b"abc"))
    with pytest.raises(BadMessage, match="leaves 2 bytes unread"):
        decode(rebuilt(header, b"zz"))
    at = header.index(b"id") + 2
    with pytest.raises(BadMessage, match="Verdict.accepted is 2, 0 or 1 was expected"):
        decode(rebuilt(header[:at] + b"\x02" + header[at + 1 :]))
    for bad in (math.nan, math.inf):
        message = sample(random.Random(1))
        with pytest.raises(BadMessage, match="a finite number was expected"):
            encode(Everything(**{**message.__dict__, "ratio": bad}))


def test_a_tensor_that_claims_more_than_the_frame_holds_is_refused_without_allocating() -> None:
    frame = encode(Assignment(0, 1, np.zeros(3, np.int64), 5))
    header = bytearray(frame[PREFIX.size : -24])
    at = bytes(header).index((3).to_bytes(8, "little"))
    for claimed in (4, 2**40, 2**63):
        header[at : at + 8] = claimed.to_bytes(8, "little")
        with pytest.raises(BadMessage, match="Assignment.problem_ids"):
            decode(rebuilt(bytes(header), frame[-24:]))


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(BadMessage, match="a virtual blob exists in the simulator only"):
        encode(Everything(**{**sample(random.Random(2)).__dict__, "blob": Blob(5, "id")}))
    with pytest.raises(BadMessage, match="does not fit into 64 bits"):
        encode(Assignment(2**70, 1, np.zeros(0), 0))
    with pytest.raises(BadMessage, match=r"Assignment.problem_ids is 'no tensor'"):
        encode(Assignment(0, 1, "no tensor", 0))  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="a tensor of complex128 cannot be sent"):
        encode(Assignment(0, 1, np.zeros(2, complex), 0))


def test_a_field_type_that_cannot_be_sent_is_refused_when_the_message_is_declared() -> None:
    with pytest.raises(TypeError, match=r"Bad.mapping: a field of type dict\[str, int\] cannot be sent"):

        @wire
        @dataclass(frozen=True)
        class Bad(Message):
            mapping: dict[str, int]


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_never_do_more_than_raise_bad_message(raw: bytes) -> None:
    for frame in (raw, rebuilt(raw), rebuilt(b"\x0a\0\0\0Submission" + raw)):
        with pytest.raises(BadMessage):
            decode(frame)


def test_ten_thousand_mutated_messages_are_read_as_messages_or_refused_with_a_reason() -> None:
    rng = random.Random(0)
    frames = [encode(SUBMISSION), *(encode(sample(random.Random(seed))) for seed in range(20))]
    refused = 0
    for _ in range(10_000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randrange(1, 4)):
            kind = rng.randrange(4)
            at = rng.randrange(len(frame))
            if kind == 0:
                frame[at] = rng.randrange(256)
            elif kind == 1:
                frame[at] ^= 1 << rng.randrange(8)
            elif kind == 2:
                del frame[at : at + rng.randrange(1, 9)]
            else:
                frame[at:at] = rng.randbytes(rng.randrange(1, 9))
        try:
            message = decode(bytes(frame))
        except BadMessage as error:
            refused += 1
            assert str(error)
        else:  # a changed value inside a field is a message still: then it is one that can be sent
            assert encode(message) == bytes(frame)
    assert refused > 5_000
