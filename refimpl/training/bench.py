"""The workbench of workers and validators: how a unit is made of a slot, and how a file is held against one.

Both sides have the same bench (a checkpoint, its tokenizer, a task and its verifier), so that what one computes the
other can compute again. Scores come from locked-down processes (`refimpl/tasks/pool.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from refimpl.engine import ProofSettings, TorchEngine
from refimpl.grpo.messages import Offer, SlotGiven
from refimpl.grpo.rewards import NO_TARGET, length_instruction, target_lengths
from refimpl.grpo.rollout import RolloutError, Sample, decode_rollouts, encode_rollouts
from refimpl.grpo.unit import Brief, Question, brief, check_rewards, check_rows, check_texts, split_proofs, unit_samples
from refimpl.grpo.validator import Finding
from refimpl.identity import address_of
from refimpl.messages import Blob
from refimpl.model.sampler import Sampling
from refimpl.model.transformer import Decoder
from refimpl.model.weights import load_decoder, load_tensors
from refimpl.tasks.pool import ScorerPool
from refimpl.tasks.problem import Problem, Split
from refimpl.tasks.table import find_task
from refimpl.testnet.problems import choose_problems
from refimpl.tokenizer import chat_ids, load_tokenizer
from refimpl.toploc.check import PRESETS, verify_answers
from refimpl.toploc.one_pass import read_replays
from refimpl.toploc.sampling_proof import CLIP
from refimpl.training.plan import TrainPlan
from refimpl.training.prices import check_work, generate_work
from refimpl.training.weights import Tensors
from refimpl.work import Work
from refimpl.workshop import DTYPES

Score = Callable[[Sequence[tuple[Problem, str]]], list[float]]
"""Task rewards of answers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MadeUnit:
    """A unit that was just generated."""

    key: str
    file: Blob
    rows: Sequence[Sample]
    tokens: int


@lru_cache(maxsize=4)
def _tokenizer(path: str) -> Any:
    """One for all nodes of a process."""
    return load_tokenizer(path)


class Bench:
    """`tensors(version)`: the weights that have arrived; None: those of the checkpoint, always."""

    def __init__(
        self,
        plan: TrainPlan,
        tensors: Callable[[int], Tensors] | None = None,
        score: Score | None = None,
    ) -> None:
        self.plan, self.rules, self._tensors = plan, plan.rules, tensors
        self.task, self.tokenizer = find_task(plan.task), _tokenizer(plan.model_path)
        self.decoder = load_decoder(plan.model_path, dtype=DTYPES[plan.dtype])
        self.ends = frozenset(self.decoder.config.eos_ids)
        self.size = self.decoder.config.size(range(len(self.decoder.layers)))
        self.proof = ProofSettings()
        self.engine = TorchEngine(self.decoder, name=plan.model_path, proof=self.proof, batch_max=self.rules.rows)
        self.version = 0
        self._pool: ScorerPool | None = None
        self._score = score or self._by_pool
        self._read: tuple[bytes | memoryview, list[Sample]] | None = None
        self._problems: dict[tuple[Split, int, int], tuple[Problem, Question]] = {}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    # -- what a slot decides --

    def problem(self, index: int, split: Split = "train", target: int = NO_TARGET) -> tuple[Problem, Question]:
        """Problem `index`, for the verifier and for the model, which is told its `target` length, tokens."""
        name = split, index, target
        if name not in self._problems:
            problem = self.task.problem(index, level=self.plan.level, split=split)
            text = self._instructed(problem.prompt, target)
            ids = (
                chat_ids(self.tokenizer, text)
                if self.task.chat
                else list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            )
            question = Question(problem_id=problem.problem_id, task=problem.task, text=text, prompt=ids)
            self._problems[name] = problem, question
        return self._problems[name]

    def _instructed(self, prompt: str, target: int) -> str:
        """A request has the instruction about its length after it; raw text, which the answer continues, before it."""
        if target == NO_TARGET:
            return prompt
        instruction = length_instruction(target, self.rules.length.kind)
        return f"{prompt} {instruction}" if self.task.chat else f"{instruction} {prompt}"

    def chosen(self, slot: SlotGiven, public_key: str) -> tuple[list[int], int]:
        """(problem indices, sampling seed) of a slot."""
        by_slot = self.plan.problem_rule == "slot"
        choice = choose_problems(
            address_of(self.plan.identity(self.plan.trainer).public_key if by_slot else public_key),
            step=slot.folder,
            counter=slot.place + 1 if by_slot else slot.counter,
            dataset_length=self.plan.dataset_length,
            count=self.rules.problems,
        )
        return [int(index) for index in choice.problem_ids], choice.sampling_seed

    def brief(self, slot: SlotGiven, public_key: str) -> Brief:
        indices, seed = self.chosen(slot, public_key)
        targets = target_lengths(seed, self.rules.problems, self.rules.length)
        questions = [self.problem(index, target=target)[1] for index, target in zip(indices, targets, strict=True)]
        return brief(questions, seed, self.rules)

    # -- making --

    def use(self, version: int) -> None:
        """Generate or replay with these weights from now on."""
        if self._tensors is not None and version != self.version:
            load_tensors(self.decoder, self._tensors(version))
            self.version = version

    def make(self, slot: SlotGiven, public_key: str, version: int) -> MadeUnit:
        """The honest unit of a slot."""
        self.use(version)
        plan, asked = self.plan, self.brief(slot, public_key)
        answers = self.engine.generate(
            [question.prompt for question in asked.questions],
            sampling=Sampling(temperature=plan.temperature),
            seeds=asked.seeds,
            max_new_tokens=plan.new_tokens_max,
        )
        texts = self.texts([answer.tokens for answer in answers])
        rewards = self.rewards(slot, public_key, texts)
        return packed(unit_samples(asked, answers, texts, rewards, version, self.rules))

    def work(self, made: MadeUnit) -> Work:
        """Prefill, as many decode steps as the longest answer took, and the proofs."""
        prompt = round(sum(len(row.input_tokens) for row in made.rows) / len(made.rows))
        return generate_work(self.size, prompt, [len(row.output_tokens) for row in made.rows])

    def texts(self, answers: Sequence[Any]) -> list[str]:
        """Answers as the verifier reads them."""
        found: list[str] = self.tokenizer.batch_decode(
            [np.asarray(answer).tolist() for answer in answers], skip_special_tokens=True
        )
        return found

    def rewards(self, slot: SlotGiven, public_key: str, texts: Sequence[str]) -> list[float]:
        """Task rewards of a unit's answers; equal answers to one problem are scored once."""
        indices, _ = self.chosen(slot, public_key)
        asked = [(indices[row // self.rules.group], text) for row, text in enumerate(texts)]
        distinct = list(dict.fromkeys(asked))
        scores = self._score([(self.problem(index)[0], text) for index, text in distinct])
        by_answer = dict(zip(distinct, scores, strict=True))
        return [by_answer[one] for one in asked]

    def _by_pool(self, answers: Sequence[tuple[Problem, str]]) -> list[float]:
        if self._pool is None:
            self._pool = ScorerPool([self.plan.task], processes=1)
        return [score.reward for score in self._pool.score(answers)]

    # -- checking --

    def version_of(self, offer: Offer) -> int | None:
        try:
            return self._rows(offer)[0].step
        except RolloutError:
            return None

    def inspect(self, offer: Offer) -> Finding:
        """Cheap checks first, then rewards, then one replay against the proofs."""
        try:
            rows = self._rows(offer)
        except RolloutError as error:
            return Finding(code="bad_file", reason=str(error))
        tokens = sum(len(row.output_tokens) for row in rows)
        if self.plan.verify:
            asked = self.brief(offer.slot, offer.public_key)
            versions = range(offer.slot.checkpoint, offer.slot.folder + 1)
            wrong = check_rows(rows, asked, self.rules, versions=versions, ends=self.ends)
            if wrong is None:
                texts = self.texts([row.output_tokens for row in rows])
                wrong = check_texts(rows, texts)
            if wrong is None:
                rewards = self.rewards(offer.slot, offer.public_key, texts)
                wrong = check_rewards(rows, asked, rewards, self.rules) or self._check_proofs(rows)
            if wrong is not None:
                return Finding(code=wrong[0], reason=wrong[1], rows=len(rows), tokens=tokens)
        return Finding(code="ok", reason="", rows=len(rows), tokens=tokens)

    def check_work(self, finding: Finding) -> Work:
        """One prefill over prompts and answers, and the proofs against it."""
        return check_work(self.size, finding.rows, finding.tokens, PROMPT_TOKENS)

    def _rows(self, offer: Offer) -> list[Sample]:
        """Of the file that is asked about twice, `version_of` and then `inspect`, read once."""
        data = offer.file.data
        if data is None:
            raise RolloutError("the file has no bytes")
        read = self._read
        if read is None or read[0] is not data:
            self._read = read = data, decode_rollouts(data, self.plan.limits(self.decoder.config.vocabulary))
        return read[1]

    def _check_proofs(self, rows: Sequence[Sample]) -> tuple[str, str] | None:
        """Proofs and log-probabilities against what the right weights compute."""
        self.use(rows[0].step)
        proof_bytes = 2 + 2 * self.proof.top_k
        proofs: list[tuple[bytes, ...]] = []
        for index, row in enumerate(rows):
            split = split_proofs(row, self.proof.chunk_tokens, proof_bytes)
            if split is None:
                return "bad_proof", f"row {index} has {len(row.proofs)} bytes of proofs: not one proof for each chunk"
            proofs.append(split)
        replays = self.engine.replay([row.input_tokens.tolist() for row in rows], [row.output_tokens for row in rows])
        verdicts = verify_answers(
            [replay.states for replay in replays],
            proofs,
            mode=self.proof.mode,
            thresholds=PRESETS[self.plan.thresholds],
            chunk_tokens=self.proof.chunk_tokens,
            top_k=self.proof.top_k,
        )
        for index, verdict in enumerate(verdicts):
            if not verdict.accepted and not verdict.undecided:
                return "bad_proof", f"row {index}: {verdict.reason}"
        readings = read_replays(replays, [row.seed or 0 for row in rows], Sampling(temperature=self.plan.temperature))
        for index, (row, reading) in enumerate(zip(rows, readings, strict=True)):
            with np.errstate(divide="ignore"):  # log 0 = -inf is off by as much
                off_n = np.abs(np.log(reading.probabilities) - row.output_logprobs)  # nothing is filtered
            if not (off_n.mean() <= LOGPROB_TOLERANCE and off_n.max() <= LOGPROB_TOLERANCE_MOST):
                off = f"{off_n.mean():.3f} off on average, {off_n.max():.3f} at most"
                return "bad_proof", f"row {index}: log-probabilities are {off}"
        for index, reading in enumerate(readings):
            if wrong := _not_the_seeds(reading.margins):
                return "wrong_seed", f"row {index}: {wrong}"
        return None


def _not_the_seeds(margins_n: np.ndarray) -> str:
    """Why these are not the tokens that a seed gives, by their margins, logits; empty: they may be."""
    found = (
        ("mean clipped margin", float(np.clip(margins_n, 0.0, CLIP).mean()), MARGIN_MAX),
        ("margin of the last token", float(margins_n[-1]), LAST_MARGIN_MAX),
        (f"margin of token {int(np.argmax(margins_n))}", float(margins_n.max()), TOKEN_MARGIN_MAX),
    )
    return next((f"{what} {value:.4f} logits, at most {most}" for what, value, most in found if not value <= most), "")


PROMPT_TOKENS = 8
"""Of a prompt, about, where a finding does not say: it prices a check in virtual time only."""
MARGIN_MAX = 0.1
"""Mean clipped margin of an answer's tokens under its seed, logits: who picks among seeds picks rewards. By answer: in
a unit's mean a single picked one drowns. Honest answers of this kind have hundredths at most (near ties)."""
LAST_MARGIN_MAX = CLIP
"""Margin of an answer's last token, logits: an end that is not the seed's cuts the answer short, and no mean over the
answer shows it. A rare end that the seed does draw has none."""
TOKEN_MARGIN_MAX = 2 * CLIP
"""Margin of any token, logits. The largest of some 500 honest ones is 0.2 in bf16, of SmolLM2; long answers have more
near ties than ends."""
LOGPROB_TOLERANCE = 0.5
"""Mean distance of a row's log-probabilities from the replay's, in nats: honest noise in bf16 lies below 0.1."""
LOGPROB_TOLERANCE_MOST = 1.0
"""Distance of any token's log-probability, nats: a single false one is lost in the mean of a long row, and multiplies
its ratio. The largest of some 500 honest ones is 0.25 in bf16, of SmolLM2."""


def packed(rows: Sequence[Sample]) -> MadeUnit:
    """A unit's rows as the file that is handed in."""
    data = encode_rollouts(rows)
    key = hashlib.sha256(data).hexdigest()
    return MadeUnit(
        key=key,
        file=Blob(len(data), key, data),
        rows=rows,
        tokens=sum(len(row.output_tokens) for row in rows),
    )


class BenchInspector:
    """A bench, as the validator's `Inspector`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.version_of, self.inspect, self.work = bench.version_of, bench.inspect, bench.check_work


def greedy_accuracy(bench: Bench, decoder: Decoder, problems: int) -> float:
    """Share of held-out problems that the likeliest answer solves; where lengths count, with a target for each."""
    engine = TorchEngine(decoder, name="held out", proof=None, batch_max=256)
    targets = target_lengths(0, problems, bench.rules.length)
    pairs = [bench.problem(index, "test", target) for index, target in enumerate(targets)]
    training = decoder.training
    decoder.eval()
    answers = engine.generate(
        [question.prompt for _, question in pairs],
        sampling=Sampling(temperature=0.0),
        seeds=[0] * problems,
        max_new_tokens=bench.plan.new_tokens_max,
    )
    decoder.train(training)
    texts = bench.texts([answer.tokens for answer in answers])
    scores = bench._score([(problem, text) for (problem, _), text in zip(pairs, texts, strict=True)])
    return sum(scores) / problems
