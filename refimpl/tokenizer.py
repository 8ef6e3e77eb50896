"""Text to token ids and back, by the checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of the checkpoint folder `path`; never asks a hub. Raises FileNotFoundError when there is none."""
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder / 'tokenizer.json'}: no tokenizer there")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """`text` as a user's turn by the chat template, ready for the answer; plain ids where there is no template."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])  # the template wrote its own specials
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
