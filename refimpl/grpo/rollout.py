"""The file that a worker hands in: prompts, answers, log-probabilities, rewards, proofs, one row an answer.

Parquet, with the columns of prime-rl's June 2025 version, so that a file opens in any data tool. Its SHA-256 is the key
of the work: what is paid, judged and trained is this content, once. It is written whole or not at all (temporary file,
fsync, rename). It is read as what it is, a stranger's bytes: bounded before anything is unpacked (`parquet_guard`),
held against the exact schema, and then every value is checked; the first wrong one is named by column and row.

Differs from the original:
1) a file that is refused is one worker's fault; there, one odd file made the trainer ignore the whole folder;
2) no dictionary encoding and no other codec than ours are accepted (see `parquet_guard`);
3) `temperature` stands last, after `seed`: the published order of those two was not to be found.

Convention: `output_logprobs[i]` is of `output_tokens[i]`, given all before it, under the distribution that was sampled
from (after temperature and filters), as the engine computed it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from refimpl.durable import write_whole
from refimpl.grpo.parquet_guard import ParquetLimits, UnsafeFile, check_file, read_footer

SCHEMA = pa.schema(
    [
        ("input_tokens", pa.list_(pa.int32())),
        ("output_tokens", pa.list_(pa.int32())),
        ("input_logprobs", pa.list_(pa.float32())),  # zeros, and nothing else
        ("output_logprobs", pa.list_(pa.float32())),
        ("prompt", pa.string()),
        ("problem_id", pa.string()),
        ("completion", pa.string()),
        ("advantages", pa.float32()),
        ("rewards", pa.float32()),
        ("task_rewards", pa.float32()),
        ("length_penalties", pa.float32()),
        ("proofs", pa.binary()),
        ("step", pa.int32()),  # the checkpoint that generated it
        ("target_lengths", pa.int32()),  # -1: none
        ("task_type", pa.string()),
        ("seed", pa.int64()),  # null: not seeded
        ("temperature", pa.float32()),
    ]
)
NULLABLE = {"seed"}
LOGPROB_MAX = 1e-3  # rounding may lift a log-probability of 0 a little above it


class RolloutError(ValueError):
    """Why a rollout file is refused. Takes exactly one argument: the sentence, which names column and row if it can."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """What a file may hold. The defaults fit the original's: 256 answers of up to 32,768 tokens, 100 MB of upload."""

    file_bytes: int = 100_000_000
    unpacked_bytes: int = 500_000_000
    rows: int = 4096
    tokens_per_row: int = 32_768  # prompt and answer
    tokens: int = 256 * 32_768  # of one column, over all rows
    vocabulary: int = 1 << 20  # token ids lie below


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One answer, as one row of the file."""

    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    output_logprobs: npt.NDArray[np.float32]
    prompt: str = ""
    problem_id: str = ""  # answers of one prompt share it: it names the group
    completion: str = ""
    advantage: float = 0.0
    reward: float = 0.0
    task_reward: float = 0.0
    length_penalty: float = 0.0
    proofs: bytes = b""
    step: int  # the checkpoint that generated it
    target_length: int = -1
    task_type: str = ""
    seed: int | None = None
    temperature: float = 1.0


def content_key(data: bytes | memoryview) -> str:
    """The key of the work: SHA-256 of the file's bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def encode_rollouts(samples: Sequence[Sample]) -> bytes:
    """The file's bytes. The same samples and the same pyarrow give the same bytes, and so the same key.

    Raises RolloutError for samples that no reader would accept, naming column and row.
    """
    if not samples:
        raise RolloutError("a rollout file needs at least one answer")
    columns = {
        "input_tokens": [s.input_tokens for s in samples],
        "output_tokens": [s.output_tokens for s in samples],
        "input_logprobs": [np.zeros(len(s.input_tokens), dtype=np.float32) for s in samples],
        "output_logprobs": [s.output_logprobs for s in samples],
        "prompt": [s.prompt for s in samples],
        "problem_id": [s.problem_id for s in samples],
        "completion": [s.completion for s in samples],
        "advantages": [s.advantage for s in samples],
        "rewards": [s.reward for s in samples],
        "task_rewards": [s.task_reward for s in samples],
        "length_penalties": [s.length_penalty for s in samples],
        "proofs": [s.proofs for s in samples],
        "step": [s.step for s in samples],
        "target_lengths": [s.target_length for s in samples],
        "task_type": [s.task_type for s in samples],
        "seed": [s.seed for s in samples],
        "temperature": [s.temperature for s in samples],
    }
    arrays = []
    for column in SCHEMA:
        try:
            arrays.append(pa.array(columns[column.name], type=column.type))
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise RolloutError(f"column {column.name!r} cannot be written as {column.type}: {error}") from error
    table = pa.Table.from_arrays(arrays, schema=SCHEMA)
    _check_values(table, RolloutLimits())
    return _to_parquet(table)


def _to_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,  # no key-value metadata: the guard refuses it
    )
    return sink.getvalue()


_REFERENCE_SCHEMA = read_footer(memoryview(_to_parquet(SCHEMA.empty_table())))[2]
"""The schema as our own writer states it in Parquet's terms."""


def decode_rollouts(data: bytes | memoryview, limits: RolloutLimits | None = None) -> list[Sample]:
    """The samples of a stranger's file, or RolloutError with the reason. Never any other exception."""
    limits = limits or RolloutLimits()
    if len(data) > limits.file_bytes:
        raise RolloutError(f"the file has {len(data)} bytes, at most {limits.file_bytes} are allowed")
    try:
        table = _read_table(memoryview(data), limits)
        _check_values(table, limits)
        return _samples(table)
    except UnsafeFile as error:
        raise RolloutError(error.args[0]) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise RolloutError(f"the file is not readable as Parquet: {str(error).splitlines()[0][:200]}") from error


def write_rollouts(path: Path, samples: Sequence[Sample]) -> str:
    """Write a file whole or not at all; returns its key. `path` never holds part of it, whenever the power goes."""
    data = encode_rollouts(samples)
    write_whole(path, data, path.with_name(f".{path.name}.{os.getpid()}.part"))
    return content_key(data)


def read_rollouts(path: Path, limits: RolloutLimits | None = None) -> tuple[list[Sample], str]:
    """(samples, key) of a file that a stranger wrote. Its size is checked before it is read."""
    limits = limits or RolloutLimits()
    with path.open("rb") as file:
        data = file.read(limits.file_bytes + 1)
    return decode_rollouts(data, limits), content_key(data)


def _read_table(data: memoryview, limits: RolloutLimits) -> pa.Table:
    check_file(
        data,
        _REFERENCE_SCHEMA,
        ParquetLimits(rows=limits.rows, values_per_column=limits.tokens, unpacked_bytes=limits.unpacked_bytes),
    )
    file = pq.ParquetFile(
        pa.BufferReader(pa.py_buffer(data)), page_checksum_verification=True, arrow_extensions_enabled=False
    )
    table = file.read(use_threads=False)
    table.validate(full=True)
    return table.cast(SCHEMA).combine_chunks()


def _check_values(table: pa.Table, limits: RolloutLimits) -> None:
    """Raise RolloutError at the first value that cannot be, naming column and row."""
    if table.num_rows > limits.rows:
        raise RolloutError(f"the file has {table.num_rows} rows, at most {limits.rows} are allowed")
    flat: dict[str, npt.NDArray] = {}
    lengths: dict[str, npt.NDArray] = {}
    for column in SCHEMA:
        name, values = column.name, _one(table, column.name)
        if values.null_count and name not in NULLABLE:
            _refuse(name, _first(values.is_null().to_numpy(zero_copy_only=False)), "is null")
        if pa.types.is_list(column.type):
            starts = values.offsets.to_numpy()
            lengths[name] = np.diff(starts)
            elements = values.values.slice(starts[0], starts[-1] - starts[0])
            if elements.null_count:
                at = _first(elements.is_null().to_numpy(zero_copy_only=False))
                _refuse(name, _row_of(at, lengths[name]), "has a null element")
            flat[name] = elements.to_numpy(zero_copy_only=False)
        elif pa.types.is_floating(column.type):
            flat[name], lengths[name] = values.to_numpy(zero_copy_only=False), np.ones(table.num_rows, dtype=np.int64)
        if name in flat and flat[name].dtype.kind == "f" and not np.isfinite(flat[name]).all():
            at = _first(~np.isfinite(flat[name]))
            _refuse(name, _row_of(at, lengths[name]), f"is {flat[name][at]}, expected a finite number")
    _check_tokens(flat, lengths, limits)
    for name, least in (("step", 0), ("target_lengths", -1)):
        numbers = _one(table, name).to_numpy(zero_copy_only=False)
        if (numbers < least).any():
            at = _first(numbers < least)
            _refuse(name, at, f"is {numbers[at]}, expected {least} or more")
    if (flat["temperature"] <= 0).any():
        at = _first(flat["temperature"] <= 0)
        _refuse("temperature", at, f"is {flat['temperature'][at]}, expected more than 0")


def _check_tokens(flat: dict[str, npt.NDArray], lengths: dict[str, npt.NDArray], limits: RolloutLimits) -> None:
    for name in ("input_tokens", "output_tokens"):
        if (lengths[name] < 1).any():
            _refuse(name, _first(lengths[name] < 1), "is empty")
        bad = (flat[name] < 0) | (flat[name] >= limits.vocabulary)
        if bad.any():
            at = _first(bad)
            _refuse(
                name, _row_of(at, lengths[name]), f"has token {flat[name][at]}, expected 0 to {limits.vocabulary - 1}"
            )
    both = lengths["input_tokens"] + lengths["output_tokens"]
    if (both > limits.tokens_per_row).any():
        at = _first(both > limits.tokens_per_row)
        _refuse(
            "output_tokens", at, f"makes {both[at]} tokens with its prompt, at most {limits.tokens_per_row} allowed"
        )
    for name, tokens in (("input_logprobs", "input_tokens"), ("output_logprobs", "output_tokens")):
        if (lengths[name] != lengths[tokens]).any():
            at = _first(lengths[name] != lengths[tokens])
            _refuse(name, at, f"has {lengths[name][at]} values for {lengths[tokens][at]} tokens")
        if (flat[name] > LOGPROB_MAX).any():
            at = _first(flat[name] > LOGPROB_MAX)
            _refuse(name, _row_of(at, lengths[name]), f"is {flat[name][at]}, which is no log-probability")
    if flat["input_logprobs"].any():
        at = _first(flat["input_logprobs"] != 0)
        _refuse(
            "input_logprobs", _row_of(at, lengths["input_logprobs"]), f"is {flat['input_logprobs'][at]}, expected 0"
        )


def _one(table: pa.Table, name: str) -> pa.Array:
    """A column as one array, whatever chunks it came in."""
    return pa.concat_arrays(table.column(name).chunks)


def _first(flags: npt.NDArray[np.bool_]) -> int:
    return int(np.argmax(flags))


def _row_of(at: int, lengths: npt.NDArray) -> int:
    return int(np.searchsorted(np.cumsum(lengths), at, side="right"))


def _refuse(column: str, row: int, what: str) -> None:
    raise RolloutError(f"column {column!r} row {row} {what}")


def _samples(table: pa.Table) -> list[Sample]:
    lists = {}
    for name in ("input_tokens", "output_tokens", "output_logprobs"):
        values = _one(table, name)
        starts = values.offsets.to_numpy()
        lists[name] = np.split(values.values.to_numpy(), starts[1:-1])
    scalars = {
        name: table.column(name).to_pylist() for name in SCHEMA.names if not pa.types.is_list(SCHEMA.field(name).type)
    }
    return [
        Sample(
            input_tokens=lists["input_tokens"][row],
            output_tokens=lists["output_tokens"][row],
            output_logprobs=lists["output_logprobs"][row],
            prompt=scalars["prompt"][row],
            problem_id=scalars["problem_id"][row],
            completion=scalars["completion"][row],
            advantage=scalars["advantages"][row],
            reward=scalars["rewards"][row],
            task_reward=scalars["task_rewards"][row],
            length_penalty=scalars["length_penalties"][row],
            proofs=scalars["proofs"][row],
            step=scalars["step"][row],
            target_length=scalars["target_lengths"][row],
            task_type=scalars["task_type"][row],
            seed=scalars["seed"][row],
            temperature=scalars["temperature"][row],
        )
        for row in range(table.num_rows)
    ]
