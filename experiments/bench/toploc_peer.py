"""The published package's half of the proof bench: obeys one order a line, answers with milliseconds.

Runs under the interpreter that has toploc (see `toploc.py` beside it), knows nothing of this project, and is started
with `-P` so that "toploc" names the package and not the bench.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import time

import torch

package = importlib.import_module("toploc")

CHUNK_TOKENS, TOP_K, TOKENS = 32, 128, 512


def main() -> None:
    for line in sys.stdin:
        action, hidden_text = line.split()
        hidden = int(hidden_text)
        if action == "load":
            states = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(hidden)).bfloat16()
            rows = list(states)
            proofs = package.build_proofs_bytes(rows, CHUNK_TOKENS, TOP_K, skip_prefill=True)
            print(hashlib.sha256(b"".join(proofs)).hexdigest(), flush=True)
            continue
        begin = time.perf_counter()
        if action == "build":
            package.build_proofs_bytes(rows, CHUNK_TOKENS, TOP_K, skip_prefill=True)
        elif action == "verify":
            package.verify_proofs_bytes(states, proofs, CHUNK_TOKENS, TOP_K, skip_prefill=True)
        elif action == "top-k":
            for i in range(0, TOKENS, CHUNK_TOKENS):
                states[i : i + CHUNK_TOKENS].view(-1).abs().topk(TOP_K)
        print((time.perf_counter() - begin) * 1e3, flush=True)


if __name__ == "__main__":
    main()
