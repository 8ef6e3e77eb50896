"""What is trained: a decoder with its optimizer, one version's step at a time, and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from refimpl.grpo.rollout import Sample
from refimpl.grpo.step import Learner, Policy, StepConfig, StepReport
from refimpl.grpo.unit import training_samples
from refimpl.grpo.vault import STATE, WEIGHTS
from refimpl.model.transformer import Decoder
from refimpl.model.weights import checkpoint_tensors, load_tensors
from refimpl.training.prices import step_work
from refimpl.training.shards import Shards
from refimpl.work import Work

Evaluate = Callable[[Decoder], float]
"""Greedy accuracy on held-out problems."""


class Student:
    """`grpo.trainer.Student` with a real model. `optimizer_steps`: on each version's batch, which is cut into as many
    parts; from the second on the policy has moved, and the ratio is taken against the weights that the version began
    with (π_p), corrected for what lies between those and the engine (w of the loss)."""

    def __init__(
        self,
        decoder: Decoder,
        config: StepConfig,
        *,
        optimizer_steps: int = 1,
        online_filter: bool = False,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 0,
        reference: Policy | None = None,
        shards: Shards | None = None,
    ) -> None:
        """`reference`: what the KL of the loss is taken to. `shards`: `decoder`, spread over several processes; each of
        them has a student, and all do the same."""
        assert reference is not None or not config.loss.kl_coef, "a KL to nothing"
        for parameter in decoder.parameters():
            parameter.requires_grad_(True)
        self.decoder, self.shards = decoder, shards
        self.learner = (
            Learner(Policy(decoder), config)
            if shards is None
            else Learner(shards.policy, config, rank=shards.rank, ranks=shards.ranks)
        )
        self.reference = reference
        self.optimizer_steps, self.online_filter = optimizer_steps, online_filter
        self.evaluate, self.evaluate_every = evaluate, evaluate_every
        self.version = 0
        self.size = decoder.config.size(range(len(decoder.layers)))

    def learn(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One version: the figures of its step, for people and plots."""
        before: dict[str, Any] = {}
        if self.evaluate_every and self.version == 0 and self.evaluate is not None:
            before["accuracy_before"] = self.evaluate(self.decoder)  # where the run began
        ready = training_samples(samples, online_filter=self.online_filter)
        reports: list[StepReport] = []
        proximal = self.learner.logprobs(ready) if self.optimizer_steps > 1 else None
        reference = self.learner.logprobs(ready, by=self.reference) if self.reference is not None else None
        for part in range(self.optimizer_steps):
            mine = slice(part, None, self.optimizer_steps)
            if ready[mine]:
                reports.append(
                    self.learner.step(
                        ready[mine],
                        proximal=None if proximal is None else proximal[mine],
                        reference=None if reference is None else reference[mine],
                    )
                )
        self.version += 1
        figures = before | batch_figures(samples) | step_figures(reports)
        figures["skipped_steps"] = self.learner.steps_skipped
        if self.evaluate_every and self.version % self.evaluate_every == 0:
            self._gather()
            if self.evaluate is not None:
                figures["accuracy"] = self.evaluate(self.decoder)
        return figures

    def _gather(self) -> None:
        """Bring the decoder up to date with its shards."""
        if self.shards is not None:
            self.shards.gather()

    def work(self, samples: Sequence[Sample]) -> Work:
        return step_work(self.size, samples, self.optimizer_steps, reference=self.reference is not None)

    def save(self, folder: Path) -> None:
        self._gather()
        state = self.learner.state() | {"version": self.version}
        if self.shards is not None and self.shards.rank:
            return  # the first process writes
        tensors = {name: tensor.contiguous().clone() for name, tensor in checkpoint_tensors(self.decoder).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        torch.save(state, folder / STATE)

    def load(self, folder: Path) -> None:
        load_tensors(self.decoder, load_file(folder / WEIGHTS))
        if self.shards is not None:
            self.shards.scatter()
        state = torch.load(folder / STATE, weights_only=True)
        self.version = state.pop("version")
        self.learner.load_state(state)


def batch_figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of all answers of a version, whether they carry a signal or not."""
    lengths = [len(sample.output_tokens) for sample in samples]
    return {
        "answers": len(samples),
        "reward_mean": sum(sample.task_reward for sample in samples) / len(samples),
        "signal_share": sum(sample.advantage != 0.0 for sample in samples) / len(samples),
        "answer_tokens": sum(lengths),
    }


def step_figures(reports: Sequence[StepReport]) -> dict[str, Any]:
    """Of the optimizer steps of a version; empty where no answer carried a signal."""
    if not reports:
        return {}
    count = len(reports)
    means = {
        name: sum(report.means[name] for report in reports) / count
        for name in ("ratio", "clipped_low", "clipped_high", "clipped_delta", "behaviour_kl", "mismatch_weight", "kl")
    }
    return {
        "loss": sum(report.loss for report in reports) / count,
        "gradient_norm": max(report.gradient_norm for report in reports),
        "ratio_max": max(report.ratio_max for report in reports),
        "entropy": sum(report.means["entropy"] for report in reports) / count,
        "applied": sum(report.applied for report in reports),
        **means,
    }
