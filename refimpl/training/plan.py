"""Everything that the nodes of one training run have in common. Plain values: it travels as JSON to other processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from refimpl.grpo.loss import KlEstimator, LossConfig, Normaliser
from refimpl.grpo.rewards import LengthConfig, LengthReward
from refimpl.grpo.rollout import RolloutLimits
from refimpl.grpo.staleness import PacingConfig
from refimpl.grpo.step import StepConfig
from refimpl.grpo.unit import UnitRules
from refimpl.identity import Identity

Rule = Literal["slot", "worker"]


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """The defaults teach the tiny model two-digit addition."""

    run_seed: int = 0
    model_path: str = "tests/data/tiny-model"
    dtype: str = "float32"  # of the trained weights, and of generation
    task: str = "addition"
    level: int = 0
    dataset_length: int = 7364  # problems 0 … n - 1 of the task's training split
    # -- the batch --
    steps: int = 200  # versions to make
    units_per_step: int = 4
    problems_per_unit: int = 16
    group: int = 8
    new_tokens_max: int = 4
    temperature: float = 1.0
    length_reward: str = "none"
    length_targets: tuple[int, ...] = (2000, 4000, 6000, 8000, 10_000)
    length_alpha: float = 3e-4
    # -- asynchrony --
    max_age: int = 2  # k
    deadline_s: float | None = 60.0  # of a slot
    online_filter: bool = False
    problem_rule: Rule = "slot"  # who decides the problems: the slot's place, or (the original) worker and counter
    newest: bool = False  # workers take the newest weights allowed, not the oldest
    in_flight: int = 2
    # -- the step --
    trainer_processes: int = 1  # over which the trainer's model is sharded
    optimizer_steps: int = 1  # per version
    learning_rate: float = 5e-4
    warm_up_steps: int = 20
    decay: bool = True  # of the learning rate, linearly to 0 over all steps that the run has
    beta2: float = 0.99
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    delta: float | None = 4.0
    kl_coef: float = 0.0  # to the checkpoint that the run began with, which is held beside the policy where this is > 0
    kl_estimator: str = "k3"  # a name of `loss.KlEstimator`
    entropy_coef: float = 0.0
    normaliser: str = "tokens"  # a name of `loss.Normaliser`
    # -- verification --
    verify: bool = True  # False: validators only look whether a file is one
    thresholds: str = "paper"
    denials_to_ban: int = 1
    # -- measurement --
    evaluate_every: int = 20  # versions, and before the first step; 0: never
    evaluate_problems: int = 256  # held out
    # -- names --
    trainer: str = "trainer"
    relays: tuple[str, ...] = ("relay",)
    validator: str = "validator"
    workers: tuple[str, ...] = ("worker-0", "worker-1")
    cheats: tuple[tuple[str, str], ...] = ()  # (worker, behaviour); see `refimpl.training.cheats`

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}, expected 'float32' or 'bfloat16'")
        if self.problem_rule not in ("slot", "worker"):
            raise ValueError(f"problem_rule is {self.problem_rule!r}, expected 'slot' or 'worker'")
        for name in ("steps", "units_per_step", "optimizer_steps", "trainer_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")
        unknown = {name for name, _ in self.cheats} - set(self.workers)
        if unknown:
            raise ValueError(f"cheats names {sorted(unknown)}, which are no workers of this run")

    @property
    def run_id(self) -> str:
        return f"train-{self.run_seed}"

    def identity(self, name: str) -> Identity:
        """Made from the run's seed, so that a run can be repeated; strangers bring keys of their own."""
        return Identity.from_seed(self.run_seed, name)

    @property
    def rules(self) -> UnitRules:
        return UnitRules(
            problems=self.problems_per_unit,
            group=self.group,
            dataset_length=self.dataset_length,
            new_tokens_max=self.new_tokens_max,
            temperature=self.temperature,
            length=LengthConfig(
                kind=LengthReward(self.length_reward), alpha=self.length_alpha, targets=self.length_targets
            ),
        )

    @property
    def pacing(self) -> PacingConfig:
        rows = self.problems_per_unit * self.group
        return PacingConfig(
            samples_per_step=self.units_per_step * rows,
            samples_per_unit=rows,
            max_age=self.max_age,
            deadline_s=self.deadline_s,
            folders=self.steps,
        )

    @property
    def step(self) -> StepConfig:
        return StepConfig(
            loss=LossConfig(
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                delta=self.delta,
                kl_coef=self.kl_coef,
                kl_estimator=KlEstimator(self.kl_estimator),
                entropy_coef=self.entropy_coef,
                normaliser=Normaliser(self.normaliser),
            ),
            temperature=self.temperature,
            new_tokens_max=self.new_tokens_max,
            learning_rate=self.learning_rate,
            warm_up_steps=self.warm_up_steps,
            decay_steps=max(1, self.steps * self.optimizer_steps - self.warm_up_steps) if self.decay else 0,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
        )

    def limits(self, vocabulary: int) -> RolloutLimits:
        """What one unit's file may hold."""
        rows, row = self.problems_per_unit * self.group, 4096 + self.new_tokens_max
        return RolloutLimits(rows=rows, tokens_per_row=row, tokens=rows * row, vocabulary=vocabulary)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TrainPlan:
        """The inverse of `as_json`, through JSON or not. Raises ValueError for a field that there is not."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"a training plan has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
        values = {name: _tuples(value) for name, value in fields.items()}
        return cls(**values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
