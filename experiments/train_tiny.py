"""Makes `tests/data/tiny-model`: five Llama layers, trained for minutes, so that tests run on trained weights.

Random weights would be the wrong thing to test proofs and detection on: their activations have no outliers, their next
token is noise, and rounding the weights changes nothing that anybody could call wrong.

Two tasks, one character a token (the answer ends with `<eos>`):

    12+34=             46           two-digit addition, left half learnt: reinforcement learning can take it from there
    9031…(52 digits)>  0011…        the digits sorted: answers of 48 and more tokens, with doubt wherever a digit ends

    python experiments/train_tiny.py [--into DIR] [--seed N]

Training stops when greedy accuracy on held-out additions lies in `ACCURACY_WANTED`, but gives the sorting `STEPS_MIN`
steps first. The result depends on the machine's floating point; the committed files are one run's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout too

from refimpl.model.config import ModelConfig
from refimpl.model.transformer import Decoder
from refimpl.model.weights import random_decoder, save_checkpoint

PAD, EOS, UNK = 0, 1, 2
SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+=>"
TOKEN = {character: len(SPECIAL) + place for place, character in enumerate(CHARACTERS)}

CONFIG = ModelConfig(
    family="llama",
    layers=5,
    hidden=64,
    intermediate=208,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=len(SPECIAL) + len(CHARACTERS),
    positions_max=256,
    norm_eps=1e-5,
    tied_head=True,
    eos_ids=(EOS,),
)
SORT_LENGTHS = (48, 60)  # digits in a sorting problem while training
STEPS_MIN, STEPS_MAX, WARM_UP = 400, 1000, 50
SORTS, ADDITIONS = 48, 24  # sequences per step
LEARNING_RATE = 3e-3
ACCURACY_WANTED = (0.37, 0.41)

Tokens = npt.NDArray[np.int64]


def held_out(a: int, b: int) -> bool:
    """Pairs that are never trained on: one in eleven."""
    return (31 * a + 17 * b) % 11 == 0


def additions() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of two-digit numbers: those to train on, those held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [p for p in pairs if not held_out(*p)], [p for p in pairs if held_out(*p)]


def ids(text: str) -> list[int]:
    return [TOKEN[character] for character in text]


def rows(problems: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] and labels [B, T]: the next token where it belongs to the answer, else −100."""
    texts = [(ids(prompt), [*ids(answer), EOS]) for prompt, answer in problems]
    length = max(len(prompt) + len(answer) for prompt, answer in texts) - 1
    tokens = torch.full((len(texts), length), PAD)
    labels = torch.full((len(texts), length), -100)
    for row, (prompt, answer) in enumerate(texts):
        whole = torch.tensor(prompt + answer)
        tokens[row, : len(whole) - 1] = whole[:-1]
        labels[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return tokens, labels


def sorting_problem(rng: np.random.Generator, length: int) -> tuple[str, str]:
    digits = [str(digit) for digit in rng.integers(0, 10, length)]
    return "".join(digits) + ">", "".join(sorted(digits))


def addition_problem(a: int, b: int) -> tuple[str, str]:
    return f"{a}+{b}=", str(a + b)


def loss_of(model: Decoder, problems: list[tuple[str, str]]) -> torch.Tensor:
    """Mean cross-entropy over the tokens of the answers."""
    tokens, labels = rows(problems)
    answered = labels != -100
    return F.cross_entropy(model.logits(model(tokens)[answered]), labels[answered])


@torch.inference_mode()
def addition_accuracy(model: Decoder, pairs: list[tuple[int, int]], generator: torch.Generator | None = None) -> float:
    """Share of right answers: greedy, or drawn at temperature 1 with a generator."""
    tokens = torch.tensor([ids(addition_problem(a, b)[0]) for a, b in pairs])
    start = tokens.shape[1]
    for _ in range(4):
        logits = model.logits(model(tokens)[:, -1])
        chosen = (
            logits.argmax(-1) if generator is None else logits.softmax(-1).multinomial(1, generator=generator)[:, 0]
        )
        tokens = torch.cat((tokens, chosen[:, None]), 1)
    right = 0
    for (a, b), row in zip(pairs, tokens[:, start:].tolist(), strict=True):
        wanted = [*ids(str(a + b)), EOS]
        right += row[: len(wanted)] == wanted
    return right / len(pairs)


def train(seed: int) -> tuple[Decoder, dict[str, float]]:
    rng = np.random.default_rng(seed)
    model = random_decoder(CONFIG, seed=seed, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    training, testing = additions()
    started_s = time.monotonic()
    accuracy = 0.0
    for step in range(1, STEPS_MAX + 1):
        for group in optimizer.param_groups:
            decay = 1.0 - 0.9 * step / STEPS_MAX
            group["lr"] = LEARNING_RATE * min(1.0, step / WARM_UP) * decay
        length = int(rng.integers(SORT_LENGTHS[0], SORT_LENGTHS[1] + 1))
        sort_loss = loss_of(model, [sorting_problem(rng, length) for _ in range(SORTS)])
        chosen = rng.integers(0, len(training), ADDITIONS)
        add_loss = loss_of(model, [addition_problem(*training[i]) for i in chosen])
        optimizer.zero_grad()
        (sort_loss + add_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or (step > STEPS_MIN and step % 2 == 0):
            accuracy = addition_accuracy(model, testing)
            spent_s = time.monotonic() - started_s
            print(
                f"step {step:5d}  {spent_s:5.0f} s  sorting loss {sort_loss.item():.4f}  "
                f"addition loss {add_loss.item():.3f}  held-out accuracy {accuracy:.3f}",
                flush=True,
            )
            if step > STEPS_MIN and ACCURACY_WANTED[0] <= accuracy <= ACCURACY_WANTED[1]:
                break
    drawn = addition_accuracy(model, testing, torch.Generator().manual_seed(seed))
    figures = {"steps": step, "greedy": accuracy, "drawn": drawn, "sorting_loss": sort_loss.item()}
    return model, figures


def save_tokenizer(folder: Path) -> None:
    """One token per character, as a `tokenizer.json` that transformers loads."""
    vocabulary = {name: place for place, name in enumerate(SPECIAL)} | TOKEN
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": CONFIG.positions_max,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[1] / "tests/data/tiny-model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, figures = train(options.seed)
    save_checkpoint(model, options.into)
    save_tokenizer(options.into)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size} parameters, {figures['steps']:.0f} steps; sorting loss {figures['sorting_loss']:.3f} a token")
    print(f"held-out additions: {figures['greedy']:.3f} right greedily, {figures['drawn']:.3f} drawn at temperature 1")
    print(f"written to {options.into}")


if __name__ == "__main__":
    main()
