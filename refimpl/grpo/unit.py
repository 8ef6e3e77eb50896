"""One unit of work: a file of whole groups of answers, as its maker builds it and as its checker takes it apart.

Nothing in a file is left to its maker but the dice, and these are seeded. The slot decides the problems, the seed of
each answer and its target length; the verifier decides the reward; rewards decide the advantages; the tokens decide the
text. So a checker can say of every column what must stand there, and for the rest, tokens and log-probabilities, a
replay answers: with the proofs, and with the seeds.

Differs from the original (prime-rl, April 2025): there the checker took rewards, advantages and target lengths as they
came; here they are computed again and must be equal.

Order of rows: all answers to the first problem, then all to the second, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from refimpl.grpo.advantage import AdvantageConfig, batch_advantages
from refimpl.grpo.packing import TrainSample, answer_length
from refimpl.grpo.rewards import LengthConfig, target_lengths, total_rewards
from refimpl.grpo.rollout import Sample

CODES = {
    "bad_signature": "not signed by the key that it names",
    "bad_file": "not a rollout file, or not the one that its key names",
    "bad_shape": "not the rows that a unit has",
    "wrong_version": "weights that the slot does not allow, or several",
    "wrong_problem": "not the problems, prompts, targets or seeds that the slot decides",
    "bad_answer": "too long, or with tokens after its end, or cut short, or with a text that is not its tokens'",
    "wrong_reward": "not the rewards or advantages that the verifier gives",
    "bad_proof": "the proofs do not fit the answers",
    "wrong_seed": "tokens that the slot's seeds do not give",
    "no_weights": "the checker does not hold these weights: nothing is said",
    "no_verdict": "the check itself failed: nothing is said",
}
"""Every word that a file may be denied with."""


@dataclass(frozen=True, kw_only=True)
class UnitRules:
    """What every unit of a run looks like."""

    problems: int  # per unit
    group: int  # answers to each
    dataset_length: int
    new_tokens_max: int
    temperature: float = 1.0
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    length: LengthConfig = field(default_factory=LengthConfig)

    def __post_init__(self) -> None:
        if self.group < 2:
            raise ValueError(f"group is {self.group}: GRPO compares answers to one prompt, 2 or more were expected")
        for name in ("problems", "dataset_length", "new_tokens_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")

    @property
    def rows(self) -> int:
        return self.problems * self.group


@dataclass(frozen=True, kw_only=True)
class Question:
    """One problem as the model sees it."""

    problem_id: str
    task: str
    text: str
    prompt: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Brief:
    """What a slot decides: all that a unit holds before anything is generated."""

    questions: Sequence[Question]  # one per row
    seeds: Sequence[int]  # one per row
    targets: Sequence[int]  # one per row


class Answer(Protocol):
    """What the engine gives per row."""

    @property
    def tokens(self) -> Any: ...

    @property
    def logprobs(self) -> Any: ...

    @property
    def proofs(self) -> tuple[bytes, ...]: ...


def brief(questions: Sequence[Question], sampling_seed: int, rules: UnitRules) -> Brief:
    """Of one question per problem and the seed that was drawn with them."""
    assert len(questions) == rules.problems
    targets = target_lengths(sampling_seed, rules.problems, rules.length)
    return Brief(
        questions=[question for question in questions for _ in range(rules.group)],
        seeds=[sampling_seed + row for row in range(rules.rows)],
        targets=[target for target in targets for _ in range(rules.group)],
    )


def unit_samples(
    brief: Brief,
    answers: Sequence[Answer],
    texts: Sequence[str],
    task_rewards: Sequence[float],
    version: int,
    rules: UnitRules,
) -> list[Sample]:
    """The rows of the file: `answers` by weights `version`, `texts` and `task_rewards` of each."""
    lengths = [len(answer.tokens) for answer in answers]
    rewards, penalties = total_rewards(task_rewards, lengths, brief.targets, rules.length)
    advantages = _advantages(rewards.astype(np.float32), brief, rules)
    return [
        Sample(
            input_tokens=np.asarray(question.prompt, dtype=np.int32),
            output_tokens=np.asarray(answers[row].tokens, dtype=np.int32),
            output_logprobs=np.asarray(answers[row].logprobs, dtype=np.float32),
            prompt=question.text,
            problem_id=question.problem_id,
            completion=texts[row],
            advantage=float(advantages[row]),
            reward=float(rewards[row]),
            task_reward=float(task_rewards[row]),
            length_penalty=float(penalties[row]),
            proofs=b"".join(answers[row].proofs),
            step=version,
            target_length=int(brief.targets[row]),
            task_type=question.task,
            seed=int(brief.seeds[row]),
            temperature=rules.temperature,
        )
        for row, question in enumerate(brief.questions)
    ]


def _advantages(reward_N: np.ndarray, brief: Brief, rules: UnitRules) -> np.ndarray:
    """Taken from the rewards as the file holds them (float32), so that a checker gets the very same numbers. A problem
    that was drawn twice makes two groups."""
    groups = np.arange(rules.rows) // rules.group
    return batch_advantages(reward_N, groups.tolist(), rules.advantage).values_N.astype(np.float32)


def check_rows(
    samples: Sequence[Sample], brief: Brief, rules: UnitRules, *, versions: range, ends: Collection[int]
) -> tuple[str, str] | None:
    """(code, sentence) for the first thing that cannot be, without a model or a verifier; None: so far so good.

    `versions`: the weights that the slot allows. `ends`: end tokens.
    """
    if len(samples) != rules.rows:
        return "bad_shape", f"{len(samples)} rows, a unit has {rules.rows}"
    version = samples[0].step
    if version not in versions:
        return "wrong_version", f"made with weights {version}, {versions.start} to {versions.stop - 1} are allowed"
    for row, sample in enumerate(samples):
        question = brief.questions[row]
        if sample.step != version:
            return "wrong_version", f"row {row} was made with weights {sample.step}, row 0 with {version}"
        if sample.problem_id != question.problem_id:
            return "wrong_problem", f"row {row} answers {_short(sample.problem_id)}, not {question.problem_id!r}"
        if sample.task_type != question.task:
            return "wrong_problem", f"row {row} is of task {_short(sample.task_type)}, not {question.task!r}"
        if sample.prompt != question.text or not np.array_equal(sample.input_tokens, question.prompt):
            return "wrong_problem", f"row {row} has another prompt than {question.problem_id!r}"
        if sample.seed != brief.seeds[row] or sample.target_length != brief.targets[row]:
            return "wrong_problem", f"row {row} has another seed or target length than the slot gives"
        if np.float32(sample.temperature) != np.float32(rules.temperature):
            return "wrong_problem", f"row {row} was sampled at temperature {sample.temperature}"
        length = len(sample.output_tokens)
        if length > rules.new_tokens_max:
            return "bad_answer", f"row {row} has {length} tokens, at most {rules.new_tokens_max} are allowed"
        if answer_length(sample.output_tokens, ends) != length:
            return "bad_answer", f"row {row} goes on after its end token"
        if int(sample.output_tokens[-1]) not in ends and length < rules.new_tokens_max:
            return "bad_answer", f"row {row} was cut after {length} tokens, without an end token"
    return None


def _short(text: str) -> str:
    """A stranger's word, in a sentence."""
    return repr(text[:64])


def check_texts(samples: Sequence[Sample], texts: Sequence[str]) -> tuple[str, str] | None:
    """Whether each row's text is that of its tokens: `texts`."""
    for row, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        if sample.completion != text:
            return "bad_answer", f"row {row} says {_short(sample.completion)}, its tokens {_short(text)}"
    return None


def check_rewards(
    samples: Sequence[Sample], brief: Brief, task_rewards: Sequence[float], rules: UnitRules
) -> tuple[str, str] | None:
    """Whether rewards and advantages are what they must be, bit for bit."""
    lengths = [len(sample.output_tokens) for sample in samples]
    rewards, penalties = total_rewards(task_rewards, lengths, brief.targets, rules.length)
    advantages = _advantages(rewards.astype(np.float32), brief, rules)
    for row, sample in enumerate(samples):
        expected = (task_rewards[row], rewards[row], penalties[row], advantages[row])
        given = (sample.task_reward, sample.reward, sample.length_penalty, sample.advantage)
        if [np.float32(value) for value in given] != [np.float32(value) for value in expected]:
            return "wrong_reward", f"row {row} says {given[1]:g} (advantage {given[3]:g}), not {expected[1]:g}"
    return None


def split_proofs(sample: Sample, chunk_tokens: int, proof_bytes: int) -> tuple[bytes, ...] | None:
    """The proofs of a row one by one; None when it has not one for each chunk."""
    chunks = -(-len(sample.output_tokens) // chunk_tokens)
    if len(sample.proofs) != chunks * proof_bytes:
        return None
    return tuple(sample.proofs[at : at + proof_bytes] for at in range(0, len(sample.proofs), proof_bytes))


def training_samples(samples: Sequence[Sample], *, online_filter: bool) -> list[TrainSample]:
    """The rows that are trained: all, or with the filter those that carry a signal."""
    return [
        TrainSample(
            prompt=sample.input_tokens,
            answer=sample.output_tokens,
            behaviour=sample.output_logprobs,
            advantage=sample.advantage,
        )
        for sample in samples
        if sample.advantage != 0.0 or not online_filter
    ]
