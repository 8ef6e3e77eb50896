"""How fast are TOPLOC proofs here, against the published C++ package, on one machine and in one run?

    python -m experiments.bench.toploc --peer PYTHON [--cores 1]

PYTHON is an interpreter whose environment has toploc 0.1.6 (built from its source release against the same torch). 16
decode proofs (512 tokens, chunks of 32, K = 128) at hidden 576, 4096 and 8192: both sides build, verify and choose the
K largest, taking turns call by call (A B A B). The table shows medians over the rounds and their ratios; "rest" is all
but the choice of the K largest. Before a hidden size counts, both sides must have built the same bytes in published
mode. Other processes on the machine hit longer calls harder: there, `--quantile 0.1` is nearer to the work itself.

Differences that remain: the package takes a list of rows where we take one tensor, and spreads verifying over all cores
where we use one thread. `--cores 1` (the default) binds both to one core; with more, only the whole calls compare.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import torch

from refimpl.toploc.check import verify_proofs
from refimpl.toploc.proof import Mode, build_proofs, chunk_bits, select

CHUNK_TOKENS, TOP_K, TOKENS = 32, 128, 512
HIDDEN = (576, 4096, 8192)
ACTIONS = ("build", "verify", "top-k")
COLUMNS = ("top-k", "build", "build rest", "verify", "verify rest")
WHOLE = ("build", "verify")
MODES: tuple[Mode, ...] = ("strict", "published")


class Peer:
    """The package, in its own process."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("toploc_peer.py")
        self.process = subprocess.Popen(
            [python, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, action: str, hidden: int) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        stdin: IO[str] = self.process.stdin
        print(action, hidden, file=stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(
                f"the peer ended with status {self.process.wait()}: does its environment have toploc 0.1.6?"
            )
        return answer.strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)


def our_actions(states: torch.Tensor, mode: Mode) -> dict[str, Callable[[], object]]:
    proofs = [proof.encode() for proof in build_proofs(states, mode=mode)]
    assert verify_proofs(states, proofs, mode=mode).accepted
    return {
        "build": lambda: [proof.encode() for proof in build_proofs(states, mode=mode)],
        "verify": lambda: verify_proofs(states, proofs, mode=mode),
        "top-k": lambda: select(*chunk_bits(states, chunk_tokens=CHUNK_TOKENS, top_k=TOP_K), TOP_K, mode=mode),
    }


def measure(peer: Peer, hidden: int, rounds: int, quantile: float) -> dict[str, dict[str, float]]:
    """Milliseconds by side and column, at `quantile` of the rounds. Exits if the two sides build different proofs."""
    states = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(hidden)).bfloat16()
    published = b"".join(proof.encode() for proof in build_proofs(states, mode="published"))
    if peer.ask("load", hidden) != hashlib.sha256(published).hexdigest():
        raise SystemExit(f"hidden {hidden}: our published proofs are not the package's")
    ours = {mode: our_actions(states, mode) for mode in MODES}
    times: dict[str, dict[str, list[float]]] = {side: {a: [] for a in ACTIONS} for side in ("package", *MODES)}
    for _ in range(rounds):
        for action in ACTIONS:
            times["package"][action].append(float(peer.ask(action, hidden)))
            for mode in MODES:
                begin = time.perf_counter()
                ours[mode][action]()
                times[mode][action].append((time.perf_counter() - begin) * 1e3)
    results = {
        side: {a: float(np.quantile(t, quantile)) for a, t in by_action.items()} for side, by_action in times.items()
    }
    for by_column in results.values():
        for action in ("build", "verify"):
            by_column[f"{action} rest"] = by_column[action] - by_column["top-k"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="interpreter of an environment with toploc 0.1.6")
    parser.add_argument("--cores", type=int, default=1, help="cores that each side may use (default 1)")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--quantile", type=float, default=0.5, help="of the rounds; lower on a busy machine")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-arguments.cores :])  # the peer inherits it
    torch.set_num_threads(arguments.cores)
    peer = Peer(arguments.peer)
    cores = f"{arguments.cores} core{'s' if arguments.cores > 1 else ''}"
    print(f"{TOKENS // CHUNK_TOKENS} proofs, K = {TOP_K}, {cores}; ms at quantile {arguments.quantile}")
    columns = COLUMNS if arguments.cores == 1 else WHOLE
    print(f"{'hidden':>6}  {'side':<10}" + "".join(f"{h:>13}" for h in columns))
    for hidden in HIDDEN:
        results = measure(peer, hidden, arguments.rounds, arguments.quantile)
        rows = {side: [by_column[column] for column in columns] for side, by_column in results.items()}
        for side, row in rows.items():
            print(f"{hidden:>6}  {side:<10}" + "".join(f"{value:>13.2f}" for value in row))
        for mode in MODES:
            ratios = [theirs / ours for theirs, ours in zip(rows["package"], rows[mode], strict=True)]
            print(f"{hidden:>6}  {'× ' + mode:<11}" + "".join(f"{ratio:>12.1f}×" for ratio in ratios))
    peer.close()


if __name__ == "__main__":
    main()
