"""How messages become bytes, one way for all; and the messages of the testnet (other protocols keep their own).

A message is a frozen dataclass marked with `@wire`. What one side sends is what the other receives, so both sides read
this file. A frame is

    magic "ARM1" | header length u32 | body length u64 | header | body        (little endian)

where the header holds the type's name and its fields in their declared order, and the body the raw bytes of tensors
and byte strings in the order in which the header names them. The encoding is canonical: one message, one frame; equal
frames, equal messages. Its size is known without encoding (`size_bytes`), which is how the simulator charges for it.

Bytes from a peer are hostile. `decode` never unpickles, never allocates more than the frame it was given, checks every
length, type, range and left-over byte, and raises nothing but `BadMessage`, with a reason.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

MAGIC = b"ARM1"
PREFIX = struct.Struct("<4sIQ")
HEADER_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 256 << 20
TENSOR_DIMENSIONS_MAX = 8
ITEMS_MAX = 1 << 16

DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64")
"""What a tensor may be made of. bfloat16 travels as its uint16 bit patterns."""
_DTYPE_CODES = {np.dtype(name): code for code, name in enumerate(DTYPES)}


class BadMessage(Exception):
    """Bytes that are no message, or a message that cannot be sent. Takes exactly one argument: the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Message:
    """Marks a dataclass that may be sent by itself (its fields may be records, which may not)."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Blob:
    """Bulk data: real bytes, or in the simulator a *virtual* blob, which is only a size and a content id.

    A 62 GB broadcast to 10 000 nodes then costs no memory, and corruption changes the content id, so that integrity
    checks still work.
    """

    size_bytes: int
    content_id: str
    data: bytes | memoryview | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blob) and (self.size_bytes, self.content_id) == (other.size_bytes, other.content_id)

    def __hash__(self) -> int:
        return hash((self.size_bytes, self.content_id))


# ---------------------------------------------------------------------------------------------------- field codecs
class _Reader:
    """A cursor over a header and a body; it cannot read past either."""

    __slots__ = ("at", "body", "body_at", "header")

    def __init__(self, header: memoryview, body: memoryview) -> None:
        self.header, self.body, self.at, self.body_at = header, body, 0, 0

    def take(self, count: int, what: str) -> memoryview:
        if count > len(self.header) - self.at:
            raise BadMessage(f"header ends inside {what}: {count} bytes wanted, {len(self.header) - self.at} left")
        self.at += count
        return self.header[self.at - count : self.at]

    def take_body(self, count: int, what: str) -> memoryview:
        if count > len(self.body) - self.body_at:
            raise BadMessage(f"body ends inside {what}: {count} bytes wanted, {len(self.body) - self.body_at} left")
        self.body_at += count
        return self.body[self.body_at - count : self.body_at]


@dataclass(frozen=True)
class _Codec:
    """How values of one field type are sized, written and read; `fixed` is the size when it does not vary."""

    size: Callable[[Any], int]
    write: Callable[[Any, bytearray, list[Any]], None]
    read: Callable[[_Reader, str], Any]
    fixed: int | None = None


_I64, _F64, _U32, _U64 = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<I"), struct.Struct("<Q")


def _write_int(value: int, header: bytearray, body: list[Any]) -> None:
    if not -(1 << 63) <= value < 1 << 63:
        raise BadMessage(f"{value} does not fit into 64 bits")
    header += _I64.pack(value)


def _read_float(reader: _Reader, what: str) -> float:
    value: float = _F64.unpack(reader.take(8, what))[0]
    if not math.isfinite(value):
        raise BadMessage(f"{what} is {value}, a finite number was expected")
    return value


def _write_float(value: float, header: bytearray, body: list[Any]) -> None:
    if not math.isfinite(value):
        raise BadMessage(f"a finite number was expected, not {value}")
    header += _F64.pack(value)


def _read_bool(reader: _Reader, what: str) -> bool:
    flag = reader.take(1, what)[0]
    if flag > 1:
        raise BadMessage(f"{what} is {flag}, 0 or 1 was expected")
    return flag == 1


def _size_str(value: str) -> int:
    return 4 + (len(value) if value.isascii() else len(value.encode()))


def _write_str(value: str, header: bytearray, body: list[Any]) -> None:
    raw = value.encode()
    header += _U32.pack(len(raw))
    header += raw


def _read_str(reader: _Reader, what: str) -> str:
    raw = reader.take(_U32.unpack(reader.take(4, what))[0], what)
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise BadMessage(f"{what} is not UTF-8") from error


def _write_bytes(value: bytes, header: bytearray, body: list[Any]) -> None:
    header += _U32.pack(len(value))
    body.append(value)


def _read_bytes(reader: _Reader, what: str) -> bytes:
    return bytes(reader.take_body(_U32.unpack(reader.take(4, what))[0], what))


def _write_array(value: np.ndarray, header: bytearray, body: list[Any]) -> None:
    code = _DTYPE_CODES.get(value.dtype)
    if code is None:
        raise BadMessage(f"a tensor of {value.dtype.name} cannot be sent; one of {', '.join(DTYPES)} can")
    if value.ndim > TENSOR_DIMENSIONS_MAX:
        raise BadMessage(f"a tensor of {value.ndim} dimensions cannot be sent; {TENSOR_DIMENSIONS_MAX} at most")
    header += bytes((code, value.ndim))
    for length in value.shape:
        header += _U64.pack(length)
    # a zero-sized view cannot be cast to bytes; it has none
    body.append(
        np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
        if value.size
        else b""
    )


def _read_array(reader: _Reader, what: str) -> np.ndarray:
    code, dimensions = reader.take(2, what)
    if code >= len(DTYPES):
        raise BadMessage(f"{what} has element type {code}, below {len(DTYPES)} was expected")
    if dimensions > TENSOR_DIMENSIONS_MAX:
        raise BadMessage(f"{what} has {dimensions} dimensions, {TENSOR_DIMENSIONS_MAX} at most were expected")
    shape = [_U64.unpack(reader.take(8, what))[0] for _ in range(dimensions)]
    dtype = np.dtype(DTYPES[code])
    if math.prod(max(length, 1) for length in shape) > FRAME_BYTES_MAX:  # also where one length is 0
        raise BadMessage(f"{what} has shape {shape}, which no frame can hold")
    raw = reader.take_body(math.prod(shape) * dtype.itemsize, what)
    return np.frombuffer(raw, dtype).reshape(shape)


def _write_blob(value: Blob, header: bytearray, body: list[Any]) -> None:
    if value.data is None:
        raise BadMessage("a virtual blob exists in the simulator only and cannot be sent")
    if len(value.data) != value.size_bytes:
        raise BadMessage(f"a blob that says {value.size_bytes} bytes holds {len(value.data)}")
    _write_str(value.content_id, header, body)
    header += _U64.pack(value.size_bytes)
    body.append(value.data)


def _read_blob(reader: _Reader, what: str) -> Blob:
    content_id = _read_str(reader, what)
    size = _U64.unpack(reader.take(8, what))[0]
    return Blob(size, content_id, reader.take_body(size, what))


_PLAIN: dict[Any, _Codec] = {
    int: _Codec(lambda v: 8, _write_int, lambda r, w: _I64.unpack(r.take(8, w))[0], 8),
    float: _Codec(lambda v: 8, _write_float, _read_float, 8),
    bool: _Codec(lambda v: 1, lambda v, h, b: h.append(1 if v else 0), _read_bool, 1),
    str: _Codec(_size_str, _write_str, _read_str),
    bytes: _Codec(lambda v: 4 + len(v), _write_bytes, _read_bytes),
    np.ndarray: _Codec(lambda v: 2 + 8 * v.ndim + v.nbytes, _write_array, _read_array),
    Blob: _Codec(lambda v: _size_str(v.content_id) + 8 + v.size_bytes, _write_blob, _read_blob),
}


def _tuple_codec(inner: _Codec) -> _Codec:
    def size(values: tuple[Any, ...]) -> int:
        if inner.fixed is not None:
            return 4 + inner.fixed * len(values)
        return 4 + sum(map(inner.size, values))

    def write(values: tuple[Any, ...], header: bytearray, body: list[Any]) -> None:
        if len(values) > ITEMS_MAX:
            raise BadMessage(f"{len(values)} items cannot be sent; {ITEMS_MAX} at most")
        header += _U32.pack(len(values))
        for value in values:
            inner.write(value, header, body)

    def read(reader: _Reader, what: str) -> tuple[Any, ...]:
        count = _U32.unpack(reader.take(4, what))[0]
        if count > ITEMS_MAX:
            raise BadMessage(f"{what} has {count} items, {ITEMS_MAX} at most were expected")
        return tuple(inner.read(reader, f"{what}[{i}]") for i in range(count))

    return _Codec(size, write, read)


def _optional_codec(inner: _Codec) -> _Codec:
    def write(value: Any, header: bytearray, body: list[Any]) -> None:
        header.append(0 if value is None else 1)
        if value is not None:
            inner.write(value, header, body)

    return _Codec(
        lambda v: 1 if v is None else 1 + inner.size(v),
        write,
        lambda r, w: inner.read(r, w) if _read_bool(r, w) else None,
    )


def _record_codec(cls: Any) -> _Codec:
    hints = typing.get_type_hints(cls)
    fields = [(f.name, _codec_of(hints[f.name], f"{cls.__name__}.{f.name}")) for f in dataclasses.fields(cls)]
    fixed = sum(codec.fixed for _, codec in fields if codec.fixed is not None)
    varying = [(name, codec.size) for name, codec in fields if codec.fixed is None]

    def size(value: Any) -> int:
        total = fixed
        for name, size_of in varying:
            total += size_of(getattr(value, name))
        return total

    def write(value: Any, header: bytearray, body: list[Any]) -> None:
        for name, codec in fields:
            try:
                codec.write(getattr(value, name), header, body)
            except (TypeError, AttributeError, struct.error) as error:
                raise BadMessage(f"{cls.__name__}.{name} is {getattr(value, name)!r:.80}: {error}") from error

    def read(reader: _Reader, what: str) -> Any:
        values = {name: codec.read(reader, f"{what}.{name}") for name, codec in fields}
        try:
            return cls(**values)
        except ValueError as error:  # the record's own check of its fields
            raise BadMessage(f"{what}: {error}") from error

    return _Codec(size, write, read, None if varying else fixed)


def _codec_of(hint: Any, where: str) -> _Codec:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple_codec(_codec_of(arguments[0], where))
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional_codec(_codec_of(arguments[0], where))
    if dataclasses.is_dataclass(hint):
        return _record_codec(hint)
    raise TypeError(f"{where}: a field of type {hint} cannot be sent")


# ------------------------------------------------------------------------------------------------------- the table
_TYPES: dict[str, tuple[type[Message], _Codec]] = {}
_CODECS: dict[type[Message], tuple[bytes, _Codec, int]] = {}
_BULK: set[str] = set()

M = TypeVar("M", bound=type[Message])


def wire(cls: M) -> M:
    """Class decorator: this frozen dataclass may be sent.

    Fields may be int (64 bits), float (finite), bool, str, bytes, numpy arrays, `Blob`, other dataclasses,
    `tuple[T, ...]` of these, and `T | None`.
    """
    name = cls.__name__
    if name in _TYPES:
        raise TypeError(f"two messages are called {name}")
    codec = _record_codec(cls)
    raw = name.encode()
    _TYPES[name] = (cls, codec)
    _CODECS[cls] = (_U32.pack(len(raw)) + raw, codec, PREFIX.size + 4 + len(raw))
    if any("Blob" in str(hint) for hint in cls.__annotations__.values()):
        _BULK.add(name)
    return cls


def carries_bulk(kind: str) -> bool:
    """Whether messages of this name have a blob among their fields: such transfers run side by side."""
    return kind in _BULK


def size_bytes(message: Message) -> int:
    """Exact size of the message's frame, without encoding it."""
    _, codec, overhead = _CODECS[type(message)]
    return overhead + codec.size(message)


def encode_parts(message: Message) -> list[Any]:
    """The frame as buffers to be written one after another; large tensors are not copied. Raises BadMessage."""
    if type(message) not in _CODECS:
        raise BadMessage(f"{type(message).__name__} is not a wire message")
    name, codec, _ = _CODECS[type(message)]
    header, body = bytearray(name), []  # type: tuple[bytearray, list[Any]]
    codec.write(message, header, body)
    if len(header) > HEADER_BYTES_MAX:
        raise BadMessage(
            f"{type(message).__name__} has a header of {len(header)} bytes, at most {HEADER_BYTES_MAX} fit"
        )
    length = sum(len(part) for part in body)
    return [PREFIX.pack(MAGIC, len(header), length), bytes(header), *body]


def encode(message: Message) -> bytes:
    """The frame of `message`. Raises BadMessage when a field cannot be sent."""
    return b"".join(encode_parts(message))


def frame_length(prefix: bytes | bytearray | memoryview, *, bytes_max: int = FRAME_BYTES_MAX) -> int:
    """Length of the whole frame from its first 16 bytes, checked against the limits. Raises BadMessage."""
    if len(prefix) < PREFIX.size:
        raise BadMessage(f"a frame starts with {PREFIX.size} bytes, only {len(prefix)} came")
    magic, header, body = PREFIX.unpack(prefix[: PREFIX.size])
    if magic != MAGIC:
        raise BadMessage(f"a frame starts with {MAGIC!r}, not {magic!r}")
    if header > HEADER_BYTES_MAX:
        raise BadMessage(f"header of {header} bytes, at most {HEADER_BYTES_MAX} were expected")
    total: int = PREFIX.size + header + body
    if total > bytes_max:
        raise BadMessage(f"frame of {total} bytes, at most {bytes_max} were expected")
    return total


def name_of(frame: bytes | bytearray | memoryview) -> str:
    """The name of the message type that a frame says it holds, without decoding it. Raises BadMessage."""
    view = memoryview(frame).toreadonly()
    frame_length(view[: PREFIX.size])
    header_bytes = PREFIX.unpack(view[: PREFIX.size])[1]
    return _read_str(_Reader(view[PREFIX.size : PREFIX.size + header_bytes], view[:0]), "message type")


def decode(frame: bytes | bytearray | memoryview, *, bytes_max: int = FRAME_BYTES_MAX) -> Message:
    """The message in `frame`, whose tensors are read-only views of it. Raises BadMessage for anything else."""
    view = memoryview(frame).toreadonly()
    total = frame_length(view[: PREFIX.size], bytes_max=bytes_max)
    if len(view) != total:
        raise BadMessage(f"frame of {len(view)} bytes, its prefix says {total}")
    header_bytes = PREFIX.unpack(view[: PREFIX.size])[1]
    reader = _Reader(view[PREFIX.size : PREFIX.size + header_bytes], view[PREFIX.size + header_bytes :])
    name = _read_str(reader, "message type")
    if name not in _TYPES:
        raise BadMessage(f"unknown message type {name[:80]!r}")
    message: Message = _TYPES[name][1].read(reader, name)
    if reader.at != len(reader.header) or reader.body_at != len(reader.body):
        left = len(reader.header) - reader.at + len(reader.body) - reader.body_at
        raise BadMessage(f"{name} leaves {left} bytes unread")
    return message


# ---------------------------------------------------------------------------------------------- testnet and rollouts
@wire
@dataclass(frozen=True)
class Ok(Message):
    """Done; nothing more to say."""


@wire
@dataclass(frozen=True)
class Register(Message):
    """A node -> ledger: open my account. The signature, by the key, is over `registration_bytes`."""

    public_key: str  # ed25519, 64 hex digits; the account's identity
    stake: float
    signature: bytes


@wire
@dataclass(frozen=True)
class AskWork(Message):
    """Worker -> orchestrator: give me prompts. Numbers rise with each new question, so that nobody can ask again in
    somebody's name; the same number again gets the same answer, for a reply may be lost."""

    public_key: str
    number: int
    signature: bytes = b""  # over `question_bytes`


def question_bytes(question: AskWork) -> bytes:
    """What a worker signs when it asks for prompts."""
    return f"{question.public_key}|{question.number}".encode()


@wire
@dataclass(frozen=True)
class Heartbeat(Message):
    """Worker -> orchestrator: I am here, and have done this much. Not signed: a forged one makes a dead node look alive
    until its work is missed, and earns nothing."""

    public_key: str
    tasks_done: int


@wire
@dataclass(frozen=True)
class Assignment(Message):
    """Orchestrator -> worker: answer these problems, chosen by the deterministic rule from (address, counter, step)."""

    step: int
    counter: int  # the worker's assignments so far, this one included
    problem_ids: np.ndarray  # int64 [n]
    sampling_seed: int  # completion i uses sampling_seed + i
    done: bool = False  # nothing left for this worker: it may stop


@wire
@dataclass(frozen=True)
class Later(Message):
    """Orchestrator -> worker: nothing for now, and it is not your fault; ask again after a while."""

    wait_s: float
    reason: str


@wire
@dataclass(frozen=True)
class Submission(Message):
    """Worker -> validator: one answer with its proofs. Its id is the SHA-256 of `submission_bytes`."""

    public_key: str
    step: int
    counter: int
    index: int  # place within the assignment
    problem_id: int
    checkpoint: str  # content hash of the weights that the worker says it used
    tokens: np.ndarray  # int32 [n], the answer
    logprobs: np.ndarray  # float32 [n], of the sampled tokens
    proofs: tuple[bytes, ...]  # one per chunk of the answer
    signature: bytes = b""  # over `submission_bytes`


def submission_bytes(submission: Submission) -> bytes:
    """What the signature covers and the id is made of: the whole submission but for the signature."""
    return encode(dataclasses.replace(submission, signature=b""))


@wire
@dataclass(frozen=True)
class Verdict(Message):
    """Validator -> worker: how a submission was judged, and why."""

    submission_id: str
    accepted: bool
    code: str  # one word from the validator's list
    reason: str  # the sentence
    decided: bool = True  # False: no verdict (the check itself failed); neither credited nor slashed
    duplicate: bool = False  # the same content had been judged before; this is the verdict from then


@wire
@dataclass(frozen=True)
class RecordVerdict(Message):
    """Validator -> ledger: credit or slash this account for this submission."""

    public_key: str
    submission_id: str
    accepted: bool
    code: str
    units: float  # verified work, credited when accepted
    validator_key: str = ""
    signature: bytes = b""  # by the validator's key, over `record_bytes`
    hard: bool = True  # of a rejection: the stake is slashed; a soft one only goes without pay


def record_bytes(record: RecordVerdict) -> bytes:
    """What a validator signs: the whole record but for the signature."""
    return encode(dataclasses.replace(record, signature=b""))


@wire
@dataclass(frozen=True)
class AskAccount(Message):
    """Anybody -> ledger: how does this account stand?"""

    public_key: str


@wire
@dataclass(frozen=True)
class Account(Message):
    """Ledger's answer: the public state of one account."""

    public_key: str
    stake: float
    earned: float
    accepted: int
    rejected: int
    ejected: bool
