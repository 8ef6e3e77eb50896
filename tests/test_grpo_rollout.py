"""The rollout file: exact schema, whole or absent; a stranger's bytes can do no more than be refused with a reason."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refimpl.grpo import rollout
from refimpl.grpo.parquet_guard import leaf_levels
from refimpl.grpo.rollout import (
    SCHEMA,
    RolloutError,
    RolloutLimits,
    Sample,
    content_key,
    decode_rollouts,
    encode_rollouts,
    read_rollouts,
    write_rollouts,
)


def sample(row: int = 0, **changes: Any) -> Sample:
    rng = np.random.default_rng(row)
    made = Sample(
        input_tokens=rng.integers(0, 97, 3 + row).astype(np.int32),
        output_tokens=rng.integers(0, 97, 5 + row).astype(np.int32),
        output_logprobs=-rng.random(5 + row).astype(np.float32),
        prompt="17+25=",
        problem_id="p7",
        completion="42 ✓",
        advantage=0.5,
        reward=0.75,
        task_reward=1.0,
        length_penalty=0.25,
        proofs=rng.bytes(258),
        step=3,
        target_length=2000,
        task_type="addition",
        seed=(1 << 40) + row,
        temperature=0.625,
    )
    return replace(made, **changes)


FILE = [sample(row) for row in range(3)]


def test_schema_is_that_of_june_2025() -> None:
    """Names, order and types of prime-rl's src/zeroband/utils/parquet.py, and `temperature`."""
    assert [f"{field.name}: {field.type}".replace("item", "element") for field in SCHEMA] == [
        "input_tokens: list<element: int32>",
        "output_tokens: list<element: int32>",
        "input_logprobs: list<element: float>",
        "output_logprobs: list<element: float>",
        "prompt: string",
        "problem_id: string",
        "completion: string",
        "advantages: float",
        "rewards: float",
        "task_rewards: float",
        "length_penalties: float",
        "proofs: binary",
        "step: int32",
        "target_lengths: int32",
        "task_type: string",
        "seed: int64",
        "temperature: float",
    ]


def test_any_data_tool_opens_it() -> None:
    table = pq.read_table(io.BytesIO(encode_rollouts(FILE)))
    assert table.schema.equals(SCHEMA) and table.num_rows == 3
    assert table["input_logprobs"].to_pylist()[1] == [0.0] * 4, "zeros, one for each prompt token"


def test_what_is_written_is_read() -> None:
    samples = [*FILE, sample(3, seed=None, proofs=b"", target_length=-1)]
    for written, read in zip(samples, decode_rollouts(encode_rollouts(samples)), strict=True):
        for name, value in vars(written).items():
            assert np.array_equal(getattr(read, name), value), name
        assert read.output_tokens.dtype == np.int32 and read.output_logprobs.dtype == np.float32


def test_the_key_is_the_content() -> None:
    """The same samples give the same key; one token more or less gives another."""
    data = encode_rollouts(FILE)
    assert content_key(data) == content_key(encode_rollouts([sample(row) for row in range(3)]))
    assert len(content_key(data)) == 64
    changed = replace(FILE[0], output_tokens=FILE[0].output_tokens + 1)
    assert content_key(encode_rollouts([changed, *FILE[1:]])) != content_key(data)


# --- atomic writes ----------------------------------------------------------------------------------------------------


def test_written_whole(tmp_path: Path) -> None:
    key = write_rollouts(tmp_path / "a.parquet", FILE)
    samples, key_read = read_rollouts(tmp_path / "a.parquet")
    assert key == key_read and len(samples) == 3
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails while the new bytes go down: the old file stands, and no fragment is left."""
    path = tmp_path / "a.parquet"
    key = write_rollouts(path, FILE)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rollout.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_rollouts(path, FILE[:1])
    monkeypatch.undo()
    assert read_rollouts(path)[1] == key and os.listdir(tmp_path) == ["a.parquet"]


# --- values -----------------------------------------------------------------------------------------------------------


def table_with(column: str, row: int, value: Any) -> pa.Table:
    """The good file's table with one value replaced."""
    table = pq.read_table(io.BytesIO(encode_rollouts(FILE)))
    values = table[column].to_pylist()
    values[row] = value
    at = table.schema.get_field_index(column)
    return table.set_column(at, SCHEMA.field(column), pa.array(values, type=SCHEMA.field(column).type))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("output_logprobs", [-1.0, NAN, -1.0, -1.0, -1.0, -1.0], "is nan"),
        ("output_logprobs", [-1.0, -INF, -1.0, -1.0, -1.0, -1.0], "is -inf"),
        ("output_logprobs", [-1.0, 0.5, -1.0, -1.0, -1.0, -1.0], "no log-probability"),
        ("output_logprobs", [-1.0, None, -1.0, -1.0, -1.0, -1.0], "has a null element"),
        ("output_logprobs", [-1.0] * 5, "has 5 values for 6 tokens"),
        ("input_logprobs", [0.0] * 9, "has 9 values for 4 tokens"),
        ("input_logprobs", [0.0, 0.0, -1.5, 0.0], "is -1.5, expected 0"),
        ("output_tokens", [], "is empty"),
        ("output_tokens", [1, 2, 3, 4, 5, -1], "has token -1"),
        ("input_tokens", [1, 2, 3, 1 << 20], "has token 1048576"),
        ("input_tokens", None, "is null"),
        ("advantages", NAN, "is nan"),
        ("rewards", INF, "is inf"),
        ("task_rewards", None, "is null"),
        ("temperature", 0.0, "expected more than 0"),
        ("step", -1, "expected 0 or more"),
        ("target_lengths", -2, "expected -1 or more"),
        ("proofs", None, "is null"),
    ],
)
def test_a_wrong_value_is_named_by_column_and_row(column: str, value: Any, reason: str) -> None:
    data = rollout._to_parquet(table_with(column, 1, value))
    with pytest.raises(RolloutError) as caught:
        decode_rollouts(data)
    assert f"column {column!r} row 1" in str(caught.value) and reason in str(caught.value)


def test_the_writer_refuses_what_no_reader_would_take() -> None:
    with pytest.raises(RolloutError, match="'advantages' row 1 is nan"):
        encode_rollouts([sample(0), sample(1, advantage=NAN)])
    with pytest.raises(RolloutError, match="'step' cannot be written as int32"):
        encode_rollouts([sample(0, step=1 << 40)])
    with pytest.raises(RolloutError, match="at least one answer"):
        encode_rollouts([])


# --- schema and size --------------------------------------------------------------------------------------------------

GOOD = pq.read_table(io.BytesIO(encode_rollouts(FILE)))


def reason_for(table: pa.Table, limits: RolloutLimits | None = None, **options: Any) -> str:
    sink = io.BytesIO()
    plain = {"use_dictionary": False, "write_statistics": False, "store_schema": False, "compression": "zstd"}
    pq.write_table(table, sink, **(plain | options))
    with pytest.raises(RolloutError) as caught:
        decode_rollouts(sink.getvalue(), limits)
    return str(caught.value)


def test_schema_equality_is_exact() -> None:
    """Names, order, types, and no column more or less."""
    assert "the columns are" in reason_for(GOOD.drop(["temperature"]))
    assert "the columns are" in reason_for(GOOD.append_column("extra", pa.array([1, 2, 3])))
    assert "the columns are" in reason_for(GOOD.select(GOOD.schema.names[::-1]))
    for name, other in (("step", pa.int64()), ("advantages", pa.float64()), ("input_tokens", pa.list_(pa.int64()))):
        at = GOOD.schema.get_field_index(name)
        assert "schema element" in reason_for(GOOD.set_column(at, name, GOOD[name].cast(other)))
    required = pa.schema([field.with_nullable(field.name != "step") for field in SCHEMA])
    assert "schema element" in reason_for(GOOD.cast(required)), "required is not optional"
    assert reason_for(GOOD.slice(0, 0)) == "the file has no rows"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dictionary": True}, "not allowed"),
        ({"compression": "gzip"}, "codec 2"),
        ({"data_page_version": "2.0"}, "has field 8"),
        ({"write_statistics": True}, "field 12"),
        ({"store_schema": True}, "the footer has field 5"),
        ({"column_encoding": {"seed": "DELTA_BINARY_PACKED"}}, "encoding 5"),
        ({"write_page_index": True}, "has field"),
    ],
)
def test_only_the_plain_form_is_let_through(options: dict, reason: str) -> None:
    assert reason in reason_for(GOOD, **options)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_other_plain_writers_are_read(compression: str) -> None:
    sink = io.BytesIO()
    pq.write_table(
        GOOD,
        sink,
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        compression=compression,
        row_group_size=2,
    )
    assert len(decode_rollouts(sink.getvalue())) == 3


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (RolloutLimits(file_bytes=100), "at most 100 are allowed"),
        (RolloutLimits(unpacked_bytes=100), "unpacks to more than the 100"),
        (RolloutLimits(rows=2), "at most 2 are allowed"),
        (RolloutLimits(tokens=10), "at most 10 are allowed"),
        (RolloutLimits(tokens_per_row=11), "makes 12 tokens with its prompt"),
        (RolloutLimits(vocabulary=50), "expected 0 to 49"),
    ],
)
def test_limits(limits: RolloutLimits, reason: str) -> None:
    with pytest.raises(RolloutError, match=reason):
        decode_rollouts(encode_rollouts(FILE), limits)


def test_a_bomb_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million zero log-probabilities of one row: 40 MB from a file of some kB. Nothing of it is unpacked."""
    count = 10_000_000
    bomb = table_with("input_logprobs", 0, []).slice(0, 1)
    at = bomb.schema.get_field_index("input_logprobs")
    zeros = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, dtype=np.float32)))
    data = rollout._to_parquet(bomb.set_column(at, SCHEMA.field(at), zeros))
    assert len(data) < 100_000
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("the file was unpacked"))
    with pytest.raises(RolloutError, match="values, at most"):
        decode_rollouts(data)
    with pytest.raises(RolloutError, match="unpacks to more than"):
        decode_rollouts(data, RolloutLimits(tokens=count, unpacked_bytes=30_000_000))


def test_levels_of_the_reference_schema() -> None:
    """Optional lists of optional numbers: repetition 1, definition 3; optional scalars: 0 and 1."""
    assert leaf_levels(rollout._REFERENCE_SCHEMA) == [(1, 3)] * 4 + [(0, 1)] * 13


# --- hostile bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1" * 3, b"PAR1\xff\xff\xff\x7fPAR1", b"\0" * 4096, b"\x89PNG" * 99]
)
def test_no_parquet_at_all(data: bytes) -> None:
    with pytest.raises(RolloutError):
        decode_rollouts(data)


@pytest.mark.parametrize("region", ["footer", "pages", "anywhere"])
def test_mutated_files_are_refused_or_read(region: str) -> None:
    """3000 files with flipped bits and cut, changed or added bytes; without checksums, so that decoders see them."""
    sink = io.BytesIO()
    pq.write_table(
        GOOD, sink, use_dictionary=False, write_statistics=False, store_schema=False, compression="none"
    )  # fmt: skip
    good = sink.getvalue()
    assert len(decode_rollouts(good)) == 3
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    low, high = {"footer": (footer, len(good)), "pages": (4, footer), "anywhere": (0, len(good))}[region]
    rng = np.random.default_rng(7)
    refused = 0
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at, size = int(rng.integers(low, high)), int(rng.integers(1, 9))
            match 0 if region == "pages" else int(rng.integers(0, 4)):
                case 0:
                    data[at : at + 1] = bytes([data[at] ^ 1 << rng.integers(0, 8)]) if at < len(data) else b""
                case 1:
                    data[at : at + 1] = rng.bytes(1)
                case 2:
                    del data[at : at + size]
                case 3:
                    data[at:at] = rng.bytes(size)
        try:
            decode_rollouts(bytes(data))
        except RolloutError as error:
            refused += 1
            assert error.args[0]
    assert refused > 300


def test_a_wrong_histogram_does_not_end_the_process() -> None:
    """pyarrow 26.0.1 aborts when asked about a column whose level histogram has the wrong length; it is not asked."""
    good = bytearray(rollout._to_parquet(GOOD))
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    # temperature's size histograms: no repetition histogram, definition has two counts, 0 and 3; make it three
    at = good.rindex(bytes.fromhex("2906 1926 0006 00"), footer)
    good[at : at + 7] = bytes.fromhex("2906 1936 000600 00")
    good[-8:-4] = (len(good) - 8 - footer).to_bytes(4, "little")
    with pytest.raises(RolloutError, match="histogram that does not fit its 2 levels"):
        decode_rollouts(bytes(good))
