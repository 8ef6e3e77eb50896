"""What a slot decides, and what a checker says of a file that says otherwise: every column, every way."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refimpl.grpo.messages import Offer, SlotGiven
from refimpl.grpo.rollout import SCHEMA, Sample, _to_parquet
from refimpl.messages import Blob
from refimpl.tasks.scorer import own_rewards
from refimpl.training.bench import Bench, packed
from refimpl.training.cheats import CHEATS, forged
from refimpl.training.watch import idle_shares, overlap_share
from tests.training_run import small_plan

SLOT = SlotGiven(index=3, folder=2, checkpoint=0, counter=1, place=1)
KEY = "ab" * 32


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(small_plan(max_age=2), score=own_rewards)


@pytest.fixture(scope="module")
def honest(bench: Bench) -> list[Sample]:
    return list(bench.make(SLOT, KEY, 0).rows)


def code_of(bench: Bench, rows: Any, slot: SlotGiven = SLOT) -> str:
    made = packed(rows)
    return bench.inspect(Offer(KEY, slot, made.key, made.file)).code


def edited(row: int, **changes: Any) -> Callable[[list[Sample]], list[Sample]]:
    def edit(rows: list[Sample]) -> list[Sample]:
        return [dataclasses.replace(sample, **changes) if i == row else sample for i, sample in enumerate(rows)]

    return edit


def cut(rows: list[Sample]) -> list[Sample]:
    last = rows[4]
    return edited(4, output_tokens=last.output_tokens[:1], output_logprobs=last.output_logprobs[:1])(rows)


def other_token(rows: list[Sample]) -> list[Sample]:
    """Another wrong first digit, in tokens and text: the reward stays what it was, the proof does not."""
    row = next(i for i, sample in enumerate(rows) if sample.task_reward == 0.0)
    tokens = rows[row].output_tokens.copy()
    tokens[0] = 3 + (tokens[0] - 3 + 5) % 10
    return edited(row, output_tokens=tokens, completion=str(tokens[0] - 3) + rows[row].completion[1:])(rows)


def test_an_honest_unit_passes_and_is_the_same_every_time(bench: Bench, honest: list[Sample]) -> None:
    assert code_of(bench, honest) == "ok"
    assert packed(honest).key == bench.make(SLOT, "cd" * 32, 0).key, "by its place, whoever takes the slot"


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda rows: rows[:-1], "bad_shape"),
        (edited(1, step=1), "wrong_version"),
        (lambda rows: [dataclasses.replace(row, step=3) for row in rows], "wrong_version"),
        (edited(2, problem_id="addition/0/0/train/1"), "wrong_problem"),
        (edited(2, input_tokens=np.array([3, 4], dtype=np.int32)), "wrong_problem"),
        (edited(6, seed=1), "wrong_problem"),
        (edited(0, temperature=0.5), "wrong_problem"),
        (cut, "bad_answer"),
        (edited(7, reward=0.5), "wrong_reward"),
        (edited(7, advantage=9.0), "wrong_reward"),
        (edited(7, proofs=b"\x01" * 258), "bad_proof"),
        (edited(7, proofs=b""), "bad_proof"),
        (other_token, "bad_proof"),
        (lambda rows: [dataclasses.replace(r, output_logprobs=r.output_logprobs - 2) for r in rows], "bad_proof"),
    ],
)  # fmt: skip
def test_whatever_is_not_as_the_slot_has_it_is_named(
    edit: Callable[[list[Sample]], list[Sample]], code: str, bench: Bench, honest: list[Sample]
) -> None:
    assert code_of(bench, edit(honest)) == code


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [("rewards-inverted", "wrong_reward"), ("answers-picked", "wrong_seed"), ("answers-cut", "wrong_seed")],
)
def test_a_forged_reward_and_a_picked_answer_are_named(behaviour: str, code: str, bench: Bench) -> None:
    """A picked answer is the right model's, with right proofs and its true reward: only the seed tells."""
    made = CHEATS[behaviour](bench).make(SLOT, KEY, 0)
    assert code_of(bench, made.rows) == code


@pytest.fixture(scope="module")
def long_bench() -> Bench:
    """Answers of 16 tokens, most of which the length limit ends."""
    return Bench(small_plan(max_age=2, task="sorting", new_tokens_max=16), score=own_rewards)


FALSE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "input_tokens": (lambda ids: [*ids[:-1], ids[-1] ^ 1], "wrong_problem"),
    "output_tokens": (lambda ids: [*ids[:7], 3 + (ids[7] - 2) % 10, *ids[8:]], "bad_answer"),  # not its text's
    "input_logprobs": (lambda numbers: [*numbers[:-1], -0.5], "bad_file"),
    "output_logprobs": (lambda numbers: [*numbers[:7], numbers[7] - 3.0, *numbers[8:]], "bad_proof"),
    "prompt": (lambda text: text + " ", "wrong_problem"),
    "problem_id": (lambda text: text[:-1] + "x", "wrong_problem"),
    "completion": (lambda text: text + "0", "bad_answer"),
    "advantages": (lambda number: number + 0.001, "wrong_reward"),
    "rewards": (lambda number: 0.001 + number, "wrong_reward"),
    "task_rewards": (lambda number: 1.0 - number, "wrong_reward"),
    "length_penalties": (lambda number: number + 0.001, "wrong_reward"),
    "proofs": (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "bad_proof"),
    "step": (lambda number: number + 1, "wrong_version"),
    "target_lengths": (lambda number: number + 1, "wrong_problem"),
    "task_type": (lambda text: "addition", "wrong_problem"),
    "seed": (lambda number: number + 1, "wrong_problem"),
    "temperature": (lambda number: number * 0.5, "wrong_problem"),
}
"""Each column's false value, in one row of an honest file, and what a checker says of it."""


@pytest.mark.parametrize("column", FALSE)
def test_a_false_value_in_any_column_is_found(column: str, long_bench: Bench) -> None:
    assert set(FALSE) == set(SCHEMA.names)
    made, (falsify, code) = long_bench.make(SLOT, KEY, 0), FALSE[column]
    rows = pq.read_table(io.BytesIO(made.file.data or b"")).to_pylist()
    row = next(row for row in rows if len(row["output_tokens"]) == 16)
    honest = row[column]
    row[column] = falsify(honest)
    assert row[column] != honest
    data = _to_parquet(pa.Table.from_pylist(rows, schema=SCHEMA))
    finding = long_bench.inspect(Offer(KEY, SLOT, "", Blob(len(data), "", data)))
    assert finding.code == code, finding.reason


@pytest.mark.parametrize("length", [2, 6, 10, 15, 16])
def test_an_answer_that_was_cut_short_is_named_whatever_its_length(length: int, long_bench: Bench) -> None:
    """Proofs, log-probabilities and rewards are right. One token of six and more is lost in the mean margin."""
    rows = list(long_bench.make(SLOT, KEY, 0).rows)
    assert code_of(long_bench, rows) == "ok"
    answers = [row.output_tokens.copy() for row in rows]
    for row, answer in enumerate(answers):
        if len(answer) == 16:
            answers[row] = np.append(answer[: length - 1], min(long_bench.ends)).astype(np.int32)
    assert code_of(long_bench, forged(long_bench, SLOT, KEY, rows, answers)) == "wrong_seed"


@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_single_token_that_is_not_the_seeds_is_named_wherever_it_stands(place: int, long_bench: Bench) -> None:
    rows = list(long_bench.make(SLOT, KEY, 0).rows)
    answers = [row.output_tokens.copy() for row in rows]
    longest = next(answer for answer in answers if len(answer) == 16)
    longest[place] = 3 if longest[place] != 3 else 4
    made = forged(long_bench, SLOT, KEY, rows, answers)
    assert code_of(long_bench, made) == "wrong_seed"


def test_an_end_that_the_seed_draws_is_right_however_rare(long_bench: Bench) -> None:
    """The model, hot, ends now and then where it finds that unlikely: its margin is 0."""
    hot = Bench(small_plan(task="sorting", new_tokens_max=16, temperature=3.0), score=own_rewards)
    rows = list(hot.make(SLOT, KEY, 0).rows)
    ended = [row for row in rows if int(row.output_tokens[-1]) in hot.ends and len(row.output_tokens) < 16]
    assert ended and min(row.output_logprobs[-1] for row in ended) < np.log(0.1)
    assert code_of(hot, rows) == "ok"


def test_a_unit_of_another_slot_is_refused(bench: Bench, honest: list[Sample]) -> None:
    assert code_of(bench, honest, dataclasses.replace(SLOT, place=0)) == "wrong_problem"
    assert code_of(bench, honest, dataclasses.replace(SLOT, checkpoint=1)) == "wrong_version"


def test_idle_and_overlap_are_counted_between_the_first_and_the_last_step() -> None:
    def busy(node: str, what: str, start_s: float, end_s: float) -> dict[str, Any]:
        return {"kind": "busy", "node": node, "what": what, "start_s": start_s, "end_s": end_s}

    events = [
        busy("t", "train", 10.0, 12.0),
        busy("w", "generate", 8.0, 11.0),
        busy("w", "generate", 12.0, 15.0),
        busy("t", "train", 18.0, 20.0),
    ]
    assert [(idle.node, idle.share) for idle in idle_shares(events, ["t", "w"])] == [
        ("t", pytest.approx(0.6)),
        ("w", pytest.approx(0.6)),
    ]
    assert overlap_share(events) == pytest.approx(1 / 9)  # 10 to 11, of 8 to 15 and 18 to 20
