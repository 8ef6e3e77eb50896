"""One optimizer step from samples to weights: pack, score, lose, accumulate, clip, and step; or skip, and say so.

Everything that decides a gradient is here and nothing that waits: the trainer's role feeds this samples and publishes
what comes out. The gradient does not depend on how samples fall into rows, micro-batches or ranks, since one
denominator serves the whole step. A step whose loss or gradient is not finite is dropped whole and counted: the weights
stay as they were.

Differs from the original (prime-rl, April 2025): 1) the learning rate is constant after its warm-up, or falls linearly,
where there was a cosine over 10^19 steps; 2) non-finite steps are skipped; 3) micro-batches are bounded in cells, not
in samples.

Shapes: N scored tokens of a micro-batch, T cells of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from refimpl.grpo.logprob import Keep, head_logprobs
from refimpl.grpo.loss import METRICS, BatchTotals, LossConfig, grpo_loss, metric_means
from refimpl.grpo.packing import PackedBatch, TrainSample, pack, plan_rows, row_length

MICRO_CELLS = {"cpu": 2048, "other": 8192}
"""On a CPU, small passes stay in its caches: an eighth faster at 128 hidden numbers."""
FloatArray = npt.NDArray[np.float32]
Hidden = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The defaults are the original's for QwQ-32B."""

    loss: LossConfig = field(default_factory=LossConfig)
    temperature: float = 1.0  # of the distribution that was sampled from
    new_tokens_max: int = 1024  # longest answer allowed; Dr. GRPO's constant
    learning_rate: float = 3e-7
    warm_up_steps: int = 25  # the rate rises linearly over so many steps
    decay_steps: int = 0  # then it falls linearly, to 0 after so many more; 0: it stays
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.01
    clip_norm: float = 0.1  # the gradient's norm is cut to this; inf: never
    row_tokens: int | None = None  # capacity of a row; None: what costs least, see packing.plan_rows
    micro_cells: int | None = None  # of a micro-batch: bounds the memory of a pass; None: `MICRO_CELLS` of the device

    def __post_init__(self) -> None:
        for name in ("temperature", "learning_rate", "clip_norm", "new_tokens_max", "micro_cells"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected more than 0")
        for name in ("warm_up_steps", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")


class Policy(nn.Module):
    """A decoder together with the scoring of its own tokens, as one module: what is sharded is gathered around both.

    `decoder(tokens_BT, positions_BT=…, mask=…)` gives normed hidden states, and `decoder.head` the head's matrix.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, batch: PackedBatch, temperature: float, keep: Keep | None = None) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) of each scored token of the batch, both (N,)."""
        mask = batch.attention_B1TT()
        positions = None if mask is None else batch.position_BT
        hidden_BTD = self.decoder(batch.token_BT, positions_BT=positions, mask=mask)
        head: Tensor = self.decoder.head  # type: ignore[assignment]
        return head_logprobs(batch.predicting(hidden_BTD), head, batch.scored(batch.token_BT), temperature, keep)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    applied: bool  # False: something was not finite, the weights are as before
    loss: float
    gradient_norm: float  # before it was cut
    learning_rate: float
    ratio_max: float
    means: dict[str, float]  # per token, by the names in loss.METRICS
    totals: BatchTotals


class Learner:
    """The policy, its optimizer, and how many steps it has taken.

    Over several processes the policy is sharded (FSDP), each of them calls the same methods with the same samples, and
    does its part of each micro-batch: `rank` of `ranks`, in torch's default process group.
    """

    def __init__(self, policy: Policy, config: StepConfig, *, rank: int = 0, ranks: int = 1) -> None:
        self.policy, self.config, self.rank, self.ranks = policy, config, rank, ranks
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("the policy has no parameter that takes a gradient")
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=all(parameter.is_floating_point() for parameter in self.parameters),
        )
        self.steps_applied = self.steps_skipped = 0

    # -- scoring without training --

    @torch.no_grad()
    def logprobs(
        self, samples: Sequence[TrainSample], keep: Keep | None = None, *, by: Policy | None = None
    ) -> list[FloatArray]:
        """Log-probabilities of each sample's answer. `by`: a reference policy; None: the weights as they are (π_p)."""
        found: dict[int, FloatArray] = {}
        policy = self.policy if by is None else by
        training = policy.training
        policy.eval()
        for batch in self.micro_batches(samples):
            found |= batch.unlay(policy(batch, self.config.temperature, keep)[0])
        policy.train(training)
        if self.ranks > 1:
            parts: list[dict[int, FloatArray]] = [{}] * self.ranks
            dist.all_gather_object(parts, found)
            found = {index: row for part in parts for index, row in part.items()}
        return [found[index] for index in range(len(samples))]

    # -- training --

    def step(
        self,
        samples: Sequence[TrainSample],
        *,
        proximal: Sequence[FloatArray] | None = None,
        reference: Sequence[FloatArray] | None = None,
        keep: Keep | None = None,
    ) -> StepReport:
        """One optimizer step on `samples`. `proximal`, `reference`: log-probabilities by sample, of `logprobs`."""
        if not samples:
            raise ValueError("a step needs at least one sample")
        config = self.config
        batches = list(self.micro_batches(samples))
        totals = BatchTotals(tokens=0, sequences=0, cells=0)
        for batch in batches:
            totals = totals + batch.totals()
        totals = self._of_all(totals)
        # gradients are averaged over ranks, and are to be added
        denominator = totals.denominator(config.loss.normaliser, config.new_tokens_max) / self.ranks
        sums_K = torch.zeros(len(METRICS), dtype=torch.float64, device=batches[0].token_BT.device)
        loss = ratio_max = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            result = self._backward(batch, denominator, proximal, reference, keep)
            sums_K += result[1]
            loss += float(result[0])
            ratio_max = max(ratio_max, float(result[2]))
        norm = float(_whole(nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)))
        if self.ranks > 1:
            loss, ratio_max = self._sum([loss])[0] / self.ranks, max(self._each(ratio_max))
            sums_K = torch.tensor(self._sum(sums_K.tolist()), dtype=torch.float64)
        applied = math.isfinite(loss) and math.isfinite(norm)
        rate = self._learning_rate()
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.steps_applied += 1
        else:
            self.steps_skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(
            applied=applied,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            ratio_max=ratio_max,
            means=metric_means(sums_K),
            totals=totals,
        )

    def _backward(
        self,
        batch: PackedBatch,
        denominator: float,
        proximal: Sequence[FloatArray] | None,
        reference: Sequence[FloatArray] | None,
        keep: Keep | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add this micro-batch's gradient; (loss, metric sums, largest ratio)."""
        logprob_N, entropy_N = self.policy(batch, self.config.temperature, keep)
        result = grpo_loss(
            logprob_N,
            batch.scored(batch.behaviour_BT),
            batch.scored(batch.advantage_BT),
            torch.ones_like(logprob_N, dtype=torch.bool),  # what is not scored was never computed
            denominator,
            self.config.loss,
            proximal_S=None if proximal is None else batch.scored(batch.lay(proximal)),
            reference_S=None if reference is None else batch.scored(batch.lay(reference)),
            entropy_S=entropy_N,
        )
        result.loss.backward()
        return result.loss.detach(), result.sums_K, result.ratio_max

    def micro_batches(self, samples: Sequence[TrainSample]) -> Iterator[PackedBatch]:
        """All samples, packed, at most `micro_cells` cells at a time (or one row); of each time, this rank's rows. All
        ranks have as many micro-batches: sharded models must run in step."""
        head: Tensor = self.policy.decoder.head  # type: ignore[assignment]
        rows = plan_rows(samples, hidden=head.shape[1], capacity=self.config.row_tokens)
        rows.sort(key=lambda row: -row_length(samples, row))  # like widths together
        device = self.parameters[0].device
        cells = self.config.micro_cells or MICRO_CELLS["cpu" if device.type == "cpu" else "other"]
        start = 0
        while start < len(rows):
            count = max(1, cells // row_length(samples, rows[start])) * self.ranks
            ours = rows[start : start + count][self.rank :: self.ranks]
            yield pack(samples, ours or [[]], share_prompts=True).to(device)  # an empty row trains nothing
            start += count

    def _learning_rate(self) -> float:
        step, warm, decay = self.steps_applied, self.config.warm_up_steps, self.config.decay_steps
        rising = min(1.0, (step + 1) / warm) if warm else 1.0
        falling = max(0.0, 1.0 - max(0, step - warm) / decay) if decay else 1.0
        return self.config.learning_rate * rising * falling

    # -- the other ranks --

    def _sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.parameters[0].device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def _each(self, value: float) -> list[float]:
        return self._sum([value if rank == self.rank else 0.0 for rank in range(self.ranks)])

    def _of_all(self, ours: BatchTotals) -> BatchTotals:
        if self.ranks == 1:
            return ours
        tokens, sequences, cells = (round(value) for value in self._sum([ours.tokens, ours.sequences, ours.cells]))
        return BatchTotals(tokens=tokens, sequences=sequences, cells=cells)

    # -- checkpoints --

    def state(self) -> dict[str, Any]:
        """All but the weights, for torch.save: whole, however it is sharded. All ranks must ask for it."""
        state = self.optimizer.state_dict()
        whole = {i: {name: _whole(value) for name, value in kept.items()} for i, kept in state["state"].items()}
        return {
            "optimizer": {**state, "state": whole},
            "steps_applied": self.steps_applied,
            "steps_skipped": self.steps_skipped,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        saved = state["optimizer"]
        kept = {
            i: {name: _like(self.parameters[i], value) for name, value in values.items()}
            for i, values in saved["state"].items()
        }
        self.optimizer.load_state_dict({**saved, "state": kept})
        self.steps_applied, self.steps_skipped = state["steps_applied"], state["steps_skipped"]


def _whole(value: Any) -> Any:
    """A tensor that is sharded, put together; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(parameter: Tensor, value: Any) -> Any:
    """A whole tensor, sharded as `parameter` is, where it has its shape."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value
