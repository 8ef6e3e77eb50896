"""Whole steps of GRPO, ours and TRL's: generate, decode, reward, learn. What `grpo_step` times; see there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT, ANSWER, GROUP = 16, 64, 16
LEARNING_RATE, CLIP_NORM = 1e-5, 0.1

Step = Callable[[], tuple[float, float]]
"""One step: (loss, gradient norm)."""


class Clock:
    """Of one step."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def reply(self, loss: float, norm: float) -> None:
        reply = {"cpu_s": time.process_time() - self.cpu, "wall_s": time.perf_counter() - self.wall}
        print("REPLY " + json.dumps(reply | {"loss": loss, "norm": norm}), flush=True)


def learner_of(decoder: Any) -> Any:
    """Our trainer, with the settings that TRL's gets."""
    from refimpl.grpo.loss import LossConfig
    from refimpl.grpo.step import Learner, Policy, StepConfig

    config = StepConfig(
        loss=LossConfig(delta=4.0), learning_rate=LEARNING_RATE, warm_up_steps=0, weight_decay=0.0, clip_norm=CLIP_NORM
    )
    learner = Learner(Policy(decoder), config)
    learner.policy.train()
    return learner


def ours_whole(model: Path, batch: dict[str, np.ndarray], proven: bool) -> Step:
    from refimpl.engine import ProofSettings, TorchEngine
    from refimpl.grpo.advantage import batch_advantages
    from refimpl.grpo.packing import TrainSample
    from refimpl.model.sampler import Sampling
    from refimpl.model.weights import load_decoder

    decoder = load_decoder(model, dtype=torch.float32, device="cpu")
    words = word_tokenizer(decoder.config.vocabulary)
    count = len(batch["prompt"])
    engine = TorchEngine(decoder, name="ours", proof=ProofSettings() if proven else None, batch_max=count)
    learner = learner_of(decoder)
    prompts, groups = batch["prompt"].tolist(), (np.arange(count) // GROUP).tolist()
    seeds = iter(range(1 << 40))

    def step() -> tuple[float, float]:
        answers = engine.generate(
            prompts,
            sampling=Sampling(),
            seeds=[next(seeds) for _ in prompts],
            max_new_tokens=ANSWER,
            eos_ids=frozenset(),
        )
        texts = words.decode_batch([answer.tokens.tolist() for answer in answers])
        advantages = batch_advantages([reward_of(text) for text in texts], groups).values_N
        samples = [
            TrainSample(
                prompt=batch["prompt"][i].astype(np.int32),
                answer=answer.tokens,
                behaviour=answer.logprobs,
                advantage=float(advantages[i]),
            )
            for i, answer in enumerate(answers)
        ]
        report = learner.step(samples)
        return report.loss, report.gradient_norm

    return step


def word_tokenizer(vocabulary: int) -> Any:
    """One word a token: `w7`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2} | {f"w{token}": token for token in range(3, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def reward_of(text: str) -> float:
    """Some reward that differs: how many words end in a 7."""
    return float(text.count("7 "))


def trl_settings(folder: str, count: int, checkpointing: bool) -> dict[str, Any]:
    """Of TRL's trainer, whatever of it is timed."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": count,
        "max_completion_length": ANSWER,
        "delta": 4.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.0,
        "gradient_checkpointing": checkpointing,
    }


def train_trl_whole(model: Path, batch: dict[str, np.ndarray], checkpointing: bool) -> None:
    """Its training loop; each step waits for a line on stdin and is answered when it ends."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not sys.stdin.readline()
            self.clock = Clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_training_stop:
                os._exit(0)
            self.clock.reply(0.0, 0.0)

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(network.config.vocab_size),
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<pad>",
    )
    prompts = batch["prompt"]
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model=network,
            reward_funcs=lambda completions, **_: [reward_of(text) for text in completions],
            args=GRPOConfig(
                **trl_settings(folder, len(prompts), checkpointing),
                num_generations=GROUP,
                generation_kwargs={"min_new_tokens": ANSWER},
                lr_scheduler_type="constant",
                max_grad_norm=CLIP_NORM,
                max_steps=10_000,
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict(
                {"prompt": [" ".join(f"w{token}" for token in prompt) for prompt in prompts[::GROUP]]}
            ),
            processing_class=tokenizer,
            callbacks=[Turns()],
        ).train()
