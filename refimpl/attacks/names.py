"""Names of every behaviour, honest or not, for those who must not import torch to know them.

`tests/test_attacks.py` holds these lists equal to the tables in `honest.py` and `catalogue.py`. One attack is no
behaviour of a worker here: `outside-top-k` edits states that a swarm's workers do not send.
"""

HONEST = ("honest", "honest-fp32", "honest-batch1", "honest-eager", "honest-split")

CHEATS = (
    "weights-8bit",
    "weights-6bit",
    "weights-4bit",
    "weights-4bit-g16",
    "weights-3bit",
    "activations-fp8",
    "kv-8bit",
    "layers-skipped",
    "early-exit",
    "pruned",
    "other-checkpoint",
    "older-version",
    "adapter-left-out",
    "sign-flipped",
    "prompt-altered",
    "prompt-truncated",
    "prompt-replaced",
    "greedy",
    "temperature-up",
    "temperature-down",
    "top-p-narrower",
    "top-p-wider",
    "top-k-5",
    "wrong-seed",
    "best-of-4",
    "draft-uncorrected",
    "draft-corrected",
    "cheap-tokens",
    "human-text",
    "repeated-text",
    "cut-early",
    "cut-with-end",
    "padded",
    "proofs-too-few",
    "proofs-null",
    "proofs-garbage",
    "proof-copied",
    "one-in-four",
    "long-answers-only",
    "after-good-record",
    "in-the-tail",
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
