"""How fast is a ring, against its peers and against its bound?

Questions and methods, each a part that can be run alone:
- `generate`: a ring of one stage against `transformers.generate`, bf16, greedy, batch 1 and 8; by turns, medians.
- `two`: two processes of one thread each against one process of two threads; by turns, medians.
- `bound`: four processes, 50 ms injected per hop: measured cycle against C = max(M tau, N (tau + lambda)).
- `hop`: one hop of 28 kB over HTTP, both ends in one event loop: processor time, bytes on the wire.
- `proofs`: what signing, committing and checking add to a token.
How the cost grows with stages, batch and length: `growth.py`.
Run: `python experiments/pipeline/speed.py [PART ...] [--model DIR] [--tiny DIR]`. Results: `speed.json`, `speed.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from refimpl.identity import Identity
from refimpl.messages import size_bytes
from refimpl.model.config import ModelConfig
from refimpl.pipeline.__main__ import arguments_of, node_file, prepared
from refimpl.pipeline.compute import torch_parts
from refimpl.pipeline.head import Head
from refimpl.pipeline.launch import NodeEntry, started
from refimpl.pipeline.messages import Hop, Taken, hop_of
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.schedule import Pass, PassRow
from refimpl.pipeline.stage import Stage, StageConfig
from refimpl.pipeline.timing import cycle_s
from refimpl.worlds.http import HttpFabric
from refimpl.worlds.local import LocalFabric


class Ring:
    """A ring in this process, for timing."""

    def __init__(self, model: str, stages: int, *, dtype: str = "bfloat16", **changes: Any) -> None:
        config = ModelConfig.from_pretrained(model)
        self.fabric = LocalFabric(run_seed=1)
        names = [f"s{at}" for at in range(stages)]
        keys = {name: Identity.from_seed(1, name) for name in names}
        cuts = tuple(round(config.layers * (at + 1) / stages) for at in range(stages))
        fields = {"rows": 8, "capacity_tokens": 1024, "temperature": 0.0, "overdue_s_min": 600.0}
        ring = RingConfig(
            ring="speed",
            layers=config.layers,
            hidden=config.hidden,
            dtype=dtype,
            cuts=cuts,
            **(fields | changes),
        )
        parts = torch_parts(model, dtype=dtype, device="cpu")
        self.stages = [Stage(self.fabric.node(n), StageConfig(hop_timeout_s=600), keys[n], parts) for n in names]
        self.head = Head(self.stages[0].world, ring, self.stages[0], {n: keys[n].public_key for n in names})
        self.calls = 0

    def run(self, body: Callable[[Ring], Any]) -> Any:
        async def main() -> Any:
            self.head.serve()
            self.stages[0].world.spawn(self.head.run(), "head")
            for stage in self.stages[1:]:
                stage.serve()
                stage.world.spawn(stage.run(), "stage")
            while not self.head.ring.up:
                await asyncio.sleep(0.01)
            return await body(self)

        return self.fabric.run(main())

    async def generate(self, prompts: list[list[int]], new: int) -> float:
        """Seconds for one batch."""
        self.calls += 1
        ids = [f"{self.calls}-{at}" for at in range(len(prompts))]
        began = time.perf_counter()
        await self.head.complete(ids, prompts, [new] * len(prompts), [0] * len(prompts))
        return time.perf_counter() - began


def random_prompts(batch: int, tokens: int, vocabulary: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, vocabulary, (batch, tokens)).tolist()


def against_transformers(options: argparse.Namespace) -> list[dict]:
    """Turn by turn on the same prompts, 32 new tokens each."""
    peer = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    vocabulary, rows = peer.config.vocab_size, []
    for batch in (1, 8):
        prompts = random_prompts(batch, 24, vocabulary)
        ids = torch.tensor(prompts)

        def theirs(ids: torch.Tensor = ids) -> tuple[float, float]:
            began, cpu = time.perf_counter(), time.process_time()
            with torch.inference_mode():
                peer.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, min_new_tokens=32, do_sample=False
                )
            return time.perf_counter() - began, time.process_time() - cpu

        async def ours(ring: Ring, prompts: list[list[int]]) -> tuple[float, float]:
            cpu = time.process_time()
            return await ring.generate(prompts, 32), time.process_time() - cpu

        async def body(ring: Ring, prompts: list[list[int]] = prompts) -> list[tuple[float, ...]]:
            await ours(ring, prompts)
            theirs()
            return [(*await ours(ring, prompts), *theirs()) for _ in range(options.turns)]

        turns = Ring(options.model, 1).run(body)
        ratio = statistics.median(t[2] / t[0] for t in turns)
        speeds = [batch * 32 / statistics.median(t[i] for t in turns) for i in (0, 2)]
        rows.append(
            {
                "part": "generate",
                "batch": batch,
                "ring_tokens_per_s": speeds[0],
                "transformers_tokens_per_s": speeds[1],
                "speed_ratio_median": ratio,
                "cpu_time_ratio_median": statistics.median(t[3] / t[1] for t in turns),
                "turns": options.turns,
            }
        )
    return rows


def process_run(
    options: argparse.Namespace, *arguments: str, threads: int = 0, requests: int = 8, new: int = 32
) -> dict:
    """One run of real processes; the head's own report."""
    given = arguments_of().parse_args(
        ["--model", options.model, "--new-tokens", str(new), "--capacity-tokens", "128", *arguments]
    )
    vocabulary = ModelConfig.from_pretrained(given.model).vocabulary
    entries, configs = prepared(given, node_file(given), random_prompts(requests, 24, vocabulary))
    return report_of(entries, configs, threads=threads, overdue_s_min=600.0)


def report_of(
    entries: Sequence[NodeEntry], configs: Sequence[dict[str, Any]], *, threads: int, overdue_s_min: float
) -> dict[str, Any]:
    """The head's report of what these processes were asked for; answers end by their length only."""
    for config in configs:
        config["ring"] |= {"stop_tokens": [], "overdue_s_min": overdue_s_min}
        config["node"]["threads"] = threads
    with started(entries, configs) as children:
        children[0].read()
        return children[0].read()


def two_processes(options: argparse.Namespace) -> list[dict]:
    """Two stages of one thread each against one process of two threads, by turns. Two micro-batches keep both stages
    busy; the one process runs the same sequences as one batch, so it reads the weights once where the ring reads them
    twice: where a pass costs the same for one row or many, that alone halves the ring's speed."""
    rows = []
    for batch in (8, 16, 32, 64):
        pairs, shape = [], {"requests": batch}
        for _ in range(options.turns):
            half, whole = str(batch // 2), str(batch)
            ring = process_run(options, "--stages", "2", "--micro-batches", "2", "--rows", half, threads=1, **shape)
            one = process_run(options, "--stages", "1", "--micro-batches", "1", "--rows", whole, threads=2, **shape)
            pairs.append((batch * 32 / ring["seconds"], batch * 32 / one["seconds"]))
        rows.append(
            {
                "part": "two",
                "batch": batch,
                "ring_tokens_per_s": statistics.median(a for a, _ in pairs),
                "one_process_tokens_per_s": statistics.median(b for _, b in pairs),
                "speed_ratio_median": statistics.median(a / b for a, b in pairs),
                "turns": len(pairs),
            }
        )
    return rows


def against_bound(options: argparse.Namespace) -> list[dict]:
    """Four stages of the tiny model, 50 ms a hop, 1 to 16 micro-batches of 4."""
    rows = []
    for micro_batches in (1, 2, 4, 8, 16):
        tiny = argparse.Namespace(model=options.tiny)
        new, sequences = 30, 4 * micro_batches
        shape = ["--dtype", "float32", "--stages", "4", "--cuts", "2,3,4,5", "--latency-ms", "50", "--rows", "4"]
        result = process_run(
            tiny, *shape, "--micro-batches", str(micro_batches), threads=1, requests=sequences, new=new
        )
        taus_s, cycle = result["tau_s"], result["cycle_s"]
        bound = cycle_s(taus_s, [0.05] * 4, micro_batches)
        rows.append(
            {
                "part": "bound",
                "stages": 4,
                "micro_batches": micro_batches,
                "hop_ms": 50,
                "tau_ms": [round(tau * 1e3, 2) for tau in taus_s],
                "cycle_ms": cycle * 1e3,
                "bound_ms": bound * 1e3,
                "share_of_bound": bound / cycle,
                "tokens_per_s": sequences / cycle,
            }
        )
    return rows


def one_hop(options: argparse.Namespace) -> list[dict]:
    """Framing, HTTP and event loop of one hop, both ends together; bytes as they leave the socket."""
    rows = []
    for count, hidden in ((2, 7168), (24, 576)):
        made = Pass(1, 0, 0, 0, tuple(PassRow(at, 50, 1, True, 7, 3) for at in range(count)))
        states = np.random.default_rng(0).integers(0, 60000, (count, hidden)).astype(np.uint16)
        hop = hop_of(made, states, (), bytes(64))
        wire, cpu_s = _wire_bytes(hop), _hop_cpu_s(hop)
        tensor = states.nbytes
        rows.append(
            {
                "part": "hop",
                "rows": count,
                "hidden": hidden,
                "tensor_bytes": tensor,
                "frame_bytes": size_bytes(hop),
                "wire_bytes": wire,
                "wire_over_tensor": wire / tensor,
                "cpu_ms_both_ends": cpu_s * 1e3,
            }
        )
    return rows


def _hop_cpu_s(hop: Hop, count: int = 400) -> float:
    fabric = HttpFabric()
    a, b = fabric.node("a"), fabric.node("b")

    async def take(source: str, message: Any) -> Any:
        return Taken(bytes(64))

    async def main() -> float:
        b.serve({Hop: take})
        best = float("inf")
        for _ in range(5):
            began = time.process_time()
            for _ in range(count // 5):
                await a.call("b", hop, 5)
            best = min(best, (time.process_time() - began) / (count // 5))
        return best

    return fabric.run(main())


def _wire_bytes(hop: Hop) -> int:
    """Bytes of request and reply of one call, counted by a proxy on the way (TCP and IP headers apart)."""
    fabric = HttpFabric()
    a, b = fabric.node("a"), fabric.node("b")
    counted = [0]

    async def take(source: str, message: Any) -> Any:
        return Taken(bytes(64))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            counted[0] += len(data)
            writer.write(data)
        writer.close()

    async def main() -> int:
        b.serve({Hop: take})
        port = int(fabric.book["b"].rsplit(":", 1)[1])

        async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            other = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, other[1]), pump(other[0], writer), return_exceptions=True)

        proxy = await asyncio.start_server(through, "127.0.0.1")
        fabric.book["b"] = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        await a.call("b", hop, 5)
        before = counted[0]
        for _ in range(10):
            await a.call("b", hop, 5)
        made = (counted[0] - before) // 10
        proxy.close()
        return made

    return fabric.run(main())


def proofs(options: argparse.Namespace) -> list[dict]:
    """Signing, committing, checking: processor time of a ring of two with and without, by turns."""
    vocabulary = ModelConfig.from_pretrained(options.model).vocabulary
    prompts = random_prompts(8, 24, vocabulary)

    async def body(ring: Ring) -> float:
        await ring.generate(prompts, 40)
        began = time.process_time()
        await ring.generate(prompts, 40)
        return time.process_time() - began

    pairs = [
        tuple(Ring(options.model, 2, signed=signed).run(body) for signed in (False, True)) for _ in range(options.turns)
    ]
    extra_s = statistics.median(b - a for a, b in pairs)
    return [
        {
            "part": "proofs",
            "batch": 8,
            "plain_cpu_ms_per_step": statistics.median(a for a, _ in pairs) / 40 * 1e3,
            "signed_cpu_ms_per_step": statistics.median(b for _, b in pairs) / 40 * 1e3,
            "extra_share": extra_s / statistics.median(a for a, _ in pairs),
            "turns": options.turns,
        }
    ]


PARTS: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "generate": against_transformers,
    "two": two_processes,
    "bound": against_bound,
    "hop": one_hop,
    "proofs": proofs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--tiny", default="tests/data/tiny-model")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    file = Path(__file__).with_suffix(".json")
    old = json.loads(file.read_text()) if file.exists() else []
    for part in options.parts or PARTS:
        rows = PARTS[part](options)
        for row in rows:
            row["load_average"] = round(os.getloadavg()[0], 1)
            print(json.dumps(row), flush=True)
        old = [row for row in old if row["part"] != part] + rows
    file.write_text(json.dumps(old, indent=1) + "\n")
    lines = []
    for part in PARTS:
        rows = [row for row in old if row["part"] == part]
        if rows:
            shown = [{key: value for key, value in row.items() if key != "part"} for row in rows]
            lines += [f"## {part}", "", *markdown(shown), ""]
    file.with_suffix(".md").write_text("\n".join(lines))


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table of these rows, which have the same keys."""
    keys = list(rows[0])
    head = [f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
    return head + [f"| {' | '.join(_cell(row[key]) for key in keys)} |" for row in rows]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
