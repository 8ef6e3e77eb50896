"""Writes noise_scores.npz: how the published package scores its own reference proofs against disturbed activations.

Run in an environment with toploc 0.1.6: `python make_noise_scores.py`. Each disturbance is one that any tensor library
repeats bit for bit: products in float32, rounded to bf16.
"""

from pathlib import Path

import numpy as np
import torch
from toploc import verify_proofs_bytes

HERE = Path(__file__).parent
DISTURBANCES = {
    "same": lambda x: x,
    "times_1.01": lambda x: (x.float() * 1.01).bfloat16(),
    "times_1.10": lambda x: (x.float() * 1.10).bfloat16(),
    "times_4": lambda x: (x.float() * 4).bfloat16(),
    "negated": lambda x: -x,
    "rolled": lambda x: x.roll(1, 0),
}

scores = {}
for name in ("a_h64_bf16", "b_h576_bf16", "c_h4096_modne"):
    data = np.load(HERE / f"{name}.npz")
    states = torch.from_numpy(data["decode_bits"].view(np.int16)).view(torch.bfloat16)
    first = 0 if data["skip_prefill"] else 1
    proofs = [bytes(proof) for proof in data["proofs"][first:]]
    for disturbance, disturb in DISTURBANCES.items():
        results = verify_proofs_bytes(
            disturb(states), proofs, int(data["decode_batching_size"]), int(data["topk"]), skip_prefill=True
        )
        scores[f"{name}/{disturbance}"] = [(r.exp_mismatches, r.mant_err_mean, r.mant_err_median) for r in results]
np.savez(HERE / "noise_scores.npz", **scores)
