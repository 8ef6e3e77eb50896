"""Sizes of well-known models, for runs in which no weights are there: what a pass costs follows from these numbers.

Source of each: the model's public config.json. DeepSeek-R1's latent attention is entered as what it caches: one latent
of 512 + 64 numbers per token and layer, written here as a single key-value head of 288.
"""

from __future__ import annotations

from pathlib import Path

from refimpl.model.config import ModelConfig
from refimpl.work import ModelSize

TABLES = Path(__file__).with_name("tables")
"""Measured scores, for the same runs; `sim/calibrated.py` reads them."""
BYTES_PER_WEIGHT = {"bfloat16": 2.0, "float32": 4.0}

MODEL_SIZES: dict[str, ModelSize] = {
    size.name: size
    for size in (
        ModelSize(
            name="SmolLM2-135M", layers=30, hidden=576, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536,
            vocabulary=49152, with_embedding=False,
        ),
        ModelSize(
            name="Llama-3.1-8B", layers=32, hidden=4096, query_heads=32, kv_heads=8, head_dim=128, intermediate=14336,
            vocabulary=128256,
        ),
        ModelSize(
            name="QwQ-32B", layers=64, hidden=5120, query_heads=40, kv_heads=8, head_dim=128, intermediate=27648,
            vocabulary=152064,
        ),
        ModelSize(
            name="DeepSeek-R1", layers=61, hidden=7168, query_heads=128, kv_heads=1, head_dim=288, intermediate=18432,
            vocabulary=129280, bytes_per_weight=1.0, experts=256, experts_active=9, expert_intermediate=2048,
        ),
    )
}  # fmt: skip


def size_of_checkpoint(path: str, dtype: str = "bfloat16") -> ModelSize:
    """The size of the checkpoint in the folder `path`, by its config.json. Raises ConfigError."""
    return ModelConfig.from_pretrained(path).size(bytes_per_weight=BYTES_PER_WEIGHT[dtype])


def known_tables() -> list[str]:
    """Names of the tables of measured scores."""
    return sorted(path.stem for path in TABLES.glob("*.json"))
