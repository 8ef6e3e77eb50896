"""`python -m refimpl.pipeline`: a model cut over several processes answers prompts.

    python -m refimpl.pipeline --model DIR --stages 3 --prompt "What is a pipeline?"     one machine
    python -m refimpl.pipeline --nodes ring.toml --prompt ...                            several (`launch.py`)

Prints the cut, each answer, and tokens/s. `--stages 1` is the model in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from refimpl.model.config import ModelConfig
from refimpl.pipeline.launch import LaunchError, NodeEntry, NodeFile, cut, even_cut, started
from refimpl.pipeline.partition import NoCut, Objective
from refimpl.tokenizer import chat_ids, load_tokenizer


def arguments_of() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="python -m refimpl.pipeline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="a checkpoint folder")
    parser.add_argument("--stages", type=int, default=2, help="processes on this machine")
    parser.add_argument("--cuts", help="where the stages end, such as 3,5,9; without it the partition decides")
    parser.add_argument(
        "--objective",
        choices=["throughput", "latency"],
        help="what the partition looks for: tokens/s with all micro-batches (the default for a node file), or the time "
        "of one token; slow nodes may be left out. Without it, --stages are equal",
    )
    parser.add_argument("--spares", type=int, default=0, help="more processes, for stages that are lost")
    parser.add_argument("--nodes", help="a node file, for several machines")
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--micro-batches",
        type=number_or_auto,
        default=1,
        help="a number, or auto: passes are measured, and what they take decides (`tune.py`)",
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences of one micro-batch; with auto: of all at most")
    parser.add_argument("--capacity-tokens", type=int, default=1024, help="of one sequence")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--latency-ms", type=float, default=0.0, help="injected per hop")
    parser.add_argument("--signed", action="store_true", help="sign every hop, commit to every chunk")
    parser.add_argument("--record", help="file that keeps requests and tokens over a restart")
    return parser


def number_or_auto(text: str) -> int | None:
    """A number; None for "auto"."""
    return None if text == "auto" else int(text)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: answered; 1: a node failed or nothing fits; 2: usage."""
    options = arguments_of().parse_args(arguments)
    try:
        answer(options)
    except (LaunchError, NoCut, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def node_file(options: argparse.Namespace) -> NodeFile:
    """The node file given, or one for so many processes here."""
    if options.nodes:
        return NodeFile.read(options.nodes)
    names = [f"stage{at}" for at in range(options.stages)] + [f"spare{at}" for at in range(options.spares)]
    half_ms = options.latency_ms / 2  # a message pays both ends' lines
    nodes = tuple(NodeEntry(name=name, latency_ms=half_ms, spare=name.startswith("spare")) for name in names)
    return NodeFile(model=options.model, dtype=options.dtype, nodes=nodes)


def answer(options: argparse.Namespace) -> None:
    """Cut, start, ask, print, stop."""
    plan = node_file(options)
    tokenizer = load_tokenizer(plan.model)
    prompts = options.prompt or ["What is pipeline parallelism?"]
    entries, configs = prepared(options, plan, [chat_ids(tokenizer, prompt) for prompt in prompts])
    with started(entries, configs) as children:
        children[0].read()  # the ring is up
        result = children[0].read()
    show(prompts, result, tokenizer)


def prepared(
    options: argparse.Namespace, plan: NodeFile, prompts: Sequence[Sequence[int]]
) -> tuple[list[NodeEntry], list[dict[str, Any]]]:
    """The nodes in the ring's order, spares last, and each one's configuration."""
    config = ModelConfig.from_pretrained(plan.model)
    seated = [node for node in plan.nodes if not node.spare]
    used, cuts = _cut(options, plan, config, seated)
    entries = [node for name in used for node in plan.nodes if node.name == name]
    entries += [node for node in plan.nodes if node.name not in used]
    for name, first, end in zip(used, [0, *cuts], cuts, strict=False):
        print(f"{name}: layers {first}..{end - 1}")
    common = {
        "model": plan.model,
        "dtype": plan.dtype,
        "run_seed": options.seed,
        "names": [node.name for node in entries],
        "latency_ms_max": max(node.latency_ms for node in entries),
        "here": sum(not node.command for node in entries),
        "ring": {
            "ring": f"cli-{options.seed}",
            "layers": config.layers,
            "hidden": config.hidden,
            "dtype": plan.dtype,
            "cuts": cuts,
            "micro_batches": options.micro_batches,
            "rows": options.rows,
            "capacity_tokens": options.capacity_tokens,
            "signed": options.signed,
            "temperature": options.temperature,
            "stop_tokens": list(config.eos_ids),
        },
        "record": options.record,
        "requests": [
            {"id": f"{options.seed}-{at}", "prompt": prompt, "new": options.new_tokens, "seed": options.seed + at}
            for at, prompt in enumerate(prompts)
        ],
    }
    return entries, [common | {"node": dataclasses.asdict(entry)} for entry in entries]


def _cut(
    options: argparse.Namespace, plan: NodeFile, config: ModelConfig, seated: Sequence[NodeEntry]
) -> tuple[list[str], list[int]]:
    """The nodes that get a stage, and where each stage ends. Says how that was decided."""
    if options.cuts:
        cuts = [int(at) for at in options.cuts.split(",")]
        if len(cuts) > len(seated):
            raise ValueError(f"--cuts names {len(cuts)} stages, there are {len(seated)} nodes")
        return [node.name for node in seated[: len(cuts)]], cuts
    if not options.nodes and options.objective is None:
        cuts = even_cut(config, seated)
        return [node.name for node in seated[: len(cuts)]], cuts
    objective: Objective = options.objective or "throughput"
    micro_batches, rows = options.micro_batches, options.rows
    if micro_batches is None:  # not measured yet: as many as nodes, which can all be busy then
        micro_batches = min(len(seated), rows)
        rows //= micro_batches
    found = cut(
        config,
        seated,
        rows=rows,
        micro_batches=micro_batches,
        capacity_tokens=options.capacity_tokens,
        dtype=plan.dtype,
        objective=objective,
    )
    used = [stage.device for stage in found.stages]
    left = [node.name for node in seated if node.name not in used]
    cycle_ms, token_ms, slowest_ms = (
        round(seconds * 1e3, 3) for seconds in (found.cycle_s, found.latency_s, found.bottleneck_s)
    )
    print(
        f"cut for {objective} with {micro_batches} x {rows} sequences: cycle {cycle_ms:g} ms, "
        f"one token {token_ms:g} ms, slowest stage or line {slowest_ms:g} ms"
        + (f"; without {', '.join(left)}" if left else "")
    )
    return used, [stage.end for stage in found.stages]


def show(prompts: Sequence[str], result: dict[str, Any], tokenizer: Any) -> None:
    """Answers and speed, and which schedule was picked."""
    for prompt, tokens in zip(prompts, result["answers"], strict=True):
        print(f"\n> {prompt}\n{tokenizer.decode(tokens, skip_special_tokens=True)}")
    made, seconds = sum(map(len, result["answers"])), result["seconds"]
    print(f"\n{made} tokens in {seconds:.2f} s: {made / seconds:.1f} tokens/s; formed {result['epoch']} time(s)")
    if picked := result["picked"]:
        taus = (
            f"{rows} rows {' + '.join(f'{seconds * 1e3:.3g}' for seconds in times_s)} ms"
            for rows, times_s in picked["tau_s"].items()
        )
        print(
            f"picked {picked['micro_batches']} micro-batch(es) of {picked['rows']}: at best "
            f"{picked['tokens_per_s']:.1f} tokens/s, {picked['gain']:.2f} times those of one micro-batch; measured: "
            f"{', '.join(taus)}; a hop {picked['hop_s'] * 1e3:.3g} ms"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
