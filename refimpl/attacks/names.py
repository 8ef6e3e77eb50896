"""Names of every behaviour, honest or not, for those who must not import torch to know them.

`tests/test_attacks.py` holds this list equal to the tables in `honest.py` and `cheats.py`.
"""

HONEST = ("honest", "honest-fp32", "honest-batch1", "honest-eager", "honest-split")

CHEATS = (
    "weights-4bit",
    "weights-8bit",
    "layers-skipped",
    "other-checkpoint",
    "prompt-altered",
    "kv-8bit",
    "sign-flipped",
    "proofs-too-few",
    "proofs-null",
    "proofs-garbage",
    "proof-copied",
    "cheap-tokens",
)

BEHAVIOURS = HONEST + CHEATS

RING_BEHAVIOURS = (
    "honest",
    "layer-skipped",
    "weights-4bit",
    "stale-weights",
    "old-reply",
    "tampered-send",
    "tampered-commitment",
    "receipt-withheld",
    "complaint-forged",
)
"""Of a stage in a simulated ring: those of `RING_CHEATS` in `ring.py` that a stand-in for a model can do by itself."""

RELAY_BEHAVIOURS = (
    "honest",
    "flipped-bit",
    "truncated",
    "equivocates",
    "stale-version",
    "forged-version",
    "lies-about-index",
    "slow-drip",
)
"""Of a relay in a broadcast: the tables `SPOILS` and `TAMPERS` in `relays.py`."""
