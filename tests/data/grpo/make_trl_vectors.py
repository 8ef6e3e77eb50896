"""Runs TRL's own GRPO loss on made-up tensors and stores what it says. See README.md beside this file.

`GRPOTrainer._compute_loss` is called as it is; only the trainer around it (model, accelerator) is a stand-in that hands
it the log-probabilities and entropies we choose.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

ROWS, TOKENS, NEW_TOKENS_MAX = 5, 7, 11
CASES: dict[str, dict[str, Any]] = {
    "plain": {"delta": None},
    "delta": {},
    "delta_high_clip": {"clip_high": 0.28},
    "delta_dr_grpo": {"normaliser": "sequences"},
    "delta_kl": {"kl_coef": 0.04},
    "delta_kl_dr_grpo": {"kl_coef": 0.04, "normaliser": "sequences"},
    "delta_entropy": {"entropy_coef": 0.001},
    "delta_mismatch": {"with_mismatch": True},
    "everything": {"kl_coef": 0.04, "entropy_coef": 0.01, "with_mismatch": True, "clip_high": 0.28},
}
DEFAULTS: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "delta": 4.0,
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "mismatch_cap": 2.0,
    "with_mismatch": False,
    "normaliser": "tokens",
    "new_tokens_max": NEW_TOKENS_MAX,
}


def make_case(name: str, seed: int) -> dict[str, Any]:
    """Float32 tensors whose ratios reach both clips and δ, ragged answers, and the settings of the case."""
    rng = np.random.default_rng(seed)
    base = rng.normal(-2.0, 0.7, (ROWS, TOKENS))
    tensors = {
        "logprob": base,
        "proximal": base + rng.normal(0, 0.9, base.shape),
        "reference": base + rng.normal(0, 0.3, base.shape),
        "entropy": rng.uniform(0.2, 2.0, base.shape),
    }
    tensors["behaviour"] = tensors["proximal"] + rng.normal(0, 0.5, base.shape)
    tensors["advantage"] = np.repeat(rng.normal(0, 1.3, (ROWS, 1)), TOKENS, axis=1)
    mask = np.arange(TOKENS) < rng.integers(1, TOKENS + 1, (ROWS, 1))
    return {k: v.astype(np.float32) for k, v in tensors.items()} | {"mask": mask} | DEFAULTS | CASES[name]


def trl_loss(case: dict[str, Any]) -> tuple[float, np.ndarray, np.ndarray]:
    """(loss, ∂/∂logprob, ∂/∂entropy) by TRL. The mismatch ratio min(π_p/μ, C) is an input of its loss; made here as in
    its `_generate_and_score_completions`."""
    logprob, entropy = (torch.tensor(case[name], requires_grad=True) for name in ("logprob", "entropy"))
    proximal, behaviour = torch.tensor(case["proximal"]), torch.tensor(case["behaviour"])
    delta = case["delta"]
    mask = torch.tensor(case["mask"])
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprob, entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=float(case["kl_coef"]),
        loss_type={"tokens": "dapo", "sequences": "dr_grpo"}[str(case["normaliser"])],
        epsilon_low=float(case["clip_low"]),
        epsilon_high=float(case["clip_high"]),
        args=SimpleNamespace(
            delta=float(delta) if delta is not None and np.isfinite(delta) else None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        use_vllm=bool(case["with_mismatch"]),
        vllm_importance_sampling_correction=bool(case["with_mismatch"]),
        max_completion_length=int(case["new_tokens_max"]),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
        ),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=float(case["entropy_coef"]) != 0.0,
        use_adaptive_entropy=False,
        entropy_coef=float(case["entropy_coef"]),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64),
        "completion_mask": mask.to(torch.int64),
        "advantages": torch.tensor(case["advantage"][:, 0]),
        "old_per_token_logps": proximal,
        "ref_per_token_logps": torch.tensor(case["reference"]),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": torch.exp(proximal - behaviour).clamp(max=float(case["mismatch_cap"])),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    grad_entropy = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    return loss.item(), logprob.grad.numpy(), grad_entropy.numpy()


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for seed, name in enumerate(CASES):
        case = make_case(name, seed)
        loss, grad_logprob, grad_entropy = trl_loss(case)
        case |= {"loss": loss, "grad_logprob": grad_logprob, "grad_entropy": grad_entropy}
        case["delta"] = np.inf if case["delta"] is None else case["delta"]
        arrays |= {f"{name}/{key}": np.asarray(value) for key, value in case.items()}
        print(f"{name:20s} loss {loss:+.6f}")
    path = Path(__file__).parent / "trl_1_16_loss.npz"
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size} bytes, made with trl {trl.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
