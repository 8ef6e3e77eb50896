"""Why: what a scenario file may say of asynchronous training: the recipe, the model that is stood in for, and the
published figures that a run is to be held against."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sim.catalogue import Strict
from sim.model_sizes import MODEL_SIZES, known_tables

FIGURES = (
    "broadcast_min",
    "first_file_min",
    "batch_min",
    "train_min",
    "step_min",
    "trainer_wait_min",
    "check_min",
    "inference_per_training",
)
"""Figures of a training run that a scenario may set a published one beside; see sim/kinds/training_figures.py."""


class PublishedPart(Strict):
    """A figure that somebody printed, and where."""

    figure: str
    value: float
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _is_known(self) -> PublishedPart:
        if self.figure not in FIGURES:
            raise ValueError(f"published figure is {self.figure!r}; known: {', '.join(FIGURES)}")
        return self


class TrainingPart(Strict):
    """Asynchronous GRPO (roles trainer, relay, validator, worker) over a stand-in for the model."""

    size: str = Field(description="a name in sim/model_sizes.py")
    table: str = Field("smollm2", description="a file in sim/tables: measured scores, which decide verdicts")
    thresholds: Literal["paper", "deployed"] = "paper"
    checkpoint_gb: float = Field(gt=0, le=100_000, description="of one version's weights; decimal")
    shard_mb: float = Field(50.0, gt=0, le=1000)
    policy: Literal["published", "moving-average", "expected-finish"] = "expected-finish"
    connections: int = Field(10, ge=1, le=256, description="transfers at once, per node")
    steps: int = Field(ge=1, le=10_000, description="versions to make")
    max_age: int = Field(2, ge=0, le=100, description="k: no trained answer is older")
    deadline_s: float = Field(3600.0, gt=0, description="after which a slot is given to another worker")
    in_flight: int = Field(2, ge=1, le=64, description="units of a worker that are judged while it makes the next")
    units_per_step: int = Field(ge=1, le=100_000)
    problems_per_unit: int = Field(ge=1, le=4096)
    group: int = Field(16, ge=2, le=1024, description="answers to each problem")
    optimizer_steps: int = Field(1, ge=1, le=1024, description="per version")
    online_filter: bool = Field(
        True, description="train only answers that carry a signal, and wait for enough of those"
    )
    prompt_tokens: int = Field(ge=1, le=32768)
    answer_tokens_max: int = Field(ge=1, le=65536)
    length_targets: tuple[int, ...] = Field(min_length=1, description="tokens that answers are asked to have")
    length_sigma: float = Field(ge=0, le=3, description="of the log-normal of an answer's length over its target")
    length_alpha: float = Field(3e-4, gt=0, description="reward per token off the target")
    solve_rate_least: float = Field(0.0, ge=0, le=1, description="of problems; uniform between the two")
    solve_rate_most: float = Field(1.0, ge=0, le=1)
    temperature: float = Field(1.0, gt=0, le=10)
    denials_to_ban: int = Field(1, ge=1, description="files that failed a check, after which a worker is not wanted")
    published: tuple[PublishedPart, ...] = ()

    @model_validator(mode="after")
    def _hangs_together(self) -> TrainingPart:
        if self.size not in MODEL_SIZES:
            raise ValueError(f"training.size is {self.size!r}; known: {', '.join(MODEL_SIZES)}")
        if self.table not in known_tables():
            raise ValueError(f"training.table is {self.table!r}; known: {', '.join(known_tables())}")
        if self.solve_rate_least > self.solve_rate_most:
            raise ValueError(
                f"training.solve_rate_least is {self.solve_rate_least}, solve_rate_most {self.solve_rate_most}; "
                "expected the least to be the smaller"
            )
        if max(self.length_targets) > self.answer_tokens_max:
            raise ValueError(
                f"training.length_targets go to {max(self.length_targets)}; answers end at {self.answer_tokens_max}"
            )
        return self
