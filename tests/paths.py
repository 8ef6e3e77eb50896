"""Where the tests' data lies."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
TINY_MODEL = DATA / "tiny-model"
SMOLLM2 = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct"
