"""python -m refimpl.arena run | cost | noise | submissions | regress | accept: see --help."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from refimpl.arena.bench import CALIBRATION, RECOMPUTED, ROOT, SETTINGS, Bench, load, save
from refimpl.arena.cost import costs
from refimpl.arena.cost import markdown as cost_table
from refimpl.arena.court import BATCH
from refimpl.arena.court import table as court_table
from refimpl.arena.judge import Cell, Limits, calibrate, cell_path, judge
from refimpl.arena.noise import Noise, atlas
from refimpl.arena.noise import markdown as noise_table
from refimpl.arena.plots import draw
from refimpl.arena.regress import accept, regress
from refimpl.arena.report import markdown, results
from refimpl.arena.savings import markdown as savings_table
from refimpl.arena.savings import savings
from refimpl.attacks.catalogue import ATTACKS
from refimpl.attacks.honest import HONEST
from refimpl.swarm import RealEngines
from refimpl.threads import set_threads
from refimpl.workshop import Agreement

RESULTS = ROOT / "experiments" / "arena"
MADE = ROOT / "runs" / "arena"
CALIBRATED_ON = ("honest", "honest-fp32", "honest-eager", "honest-split")


def read_limits(path: Path, setting: str) -> Limits:
    """The setting's limits; those of the table when there are none."""
    return dict(json.loads(path.read_text(encoding="utf-8")).get(setting, {})) if path.exists() else {}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run(options: argparse.Namespace) -> int:
    """Judge all behaviours of a setting, and write tables and pictures."""
    bench = Bench(SETTINGS[options.setting], options.made)
    setting, until = bench.setting, time.monotonic() + 60 * options.minutes
    limits_path = options.into / "limits.json"
    limits = read_limits(limits_path, setting.name)
    if options.calibrate or not limits:
        chosen = [
            n
            for n in CALIBRATED_ON
            if not options.kept_only or bench.made(n, setting.calibration_sequences, CALIBRATION)
        ]
        limits = calibrate(bench, chosen, setting.calibration_sequences)
        known = json.loads(limits_path.read_text(encoding="utf-8")) if limits_path.exists() else {}
        write_json(limits_path, known | {setting.name: limits})
        print(f"limits from {', '.join(chosen)}: " + ", ".join(f"{k} {v:.4g}" for k, v in limits.items()))
    cells: dict[str, Cell] = {}
    for behaviour in [RECOMPUTED, *HONEST, *ATTACKS]:
        count = setting.count(behaviour)
        if options.only and behaviour not in (*options.only, "honest"):
            continue
        kept = cell_path(bench, behaviour, count, limits)
        if not kept.exists() and (time.monotonic() > until or (options.kept_only and not bench.made(behaviour, count))):
            print(f"{behaviour:<20} left out; the same command without --kept-only and --minutes makes it")
            continue
        if behaviour == RECOMPUTED:
            list(bench.batches(behaviour, count))
            continue
        if not kept.exists():
            save(kept, judge(bench, behaviour, count, limits))
        cells[behaviour] = load(kept)
        print(
            f"{behaviour:<20} " + "  ".join(f"{p} {cells[behaviour].rate(p)}" for p in ("published", "default")),
            flush=True,
        )
    if not cells:
        print("nothing is kept that could be judged")
        return 1
    measured = options.into / f"{setting.name}-savings.json"
    found = results(bench, cells, limits, json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else {})
    write_json(options.into / f"{setting.name}.json", found)
    command = f"python -m refimpl.arena run {setting.name}"
    (options.into / f"{setting.name}.md").write_text(markdown(found, command), encoding="utf-8")
    for path in draw(options.into, found, cells, limits):
        print(path)
    return 0


def cost(options: argparse.Namespace) -> int:
    """Measure what verifying costs, and write the table."""
    bench = Bench(SETTINGS[options.setting], options.made)
    torch.set_num_threads(1)
    found = list(costs(bench, options.lengths, options.batches))
    lengths, batches = (" ".join(map(str, numbers)) for numbers in (options.lengths, options.batches))
    command = f"python -m refimpl.arena cost {options.setting} --lengths {lengths} --batches {batches}"
    text = cost_table(found, command)
    print(text, flush=True)
    saved = list(savings(bench))
    text += f"\n## What an attack saves here\n\n{savings_table(saved, command)}"
    write_json(options.into / f"{options.setting}-savings.json", {one.attack: round(one.measured, 4) for one in saved})
    (options.into / f"{options.setting}-cost.md").write_text(
        f"# Cost of verifying: {options.setting}\n\n{text}", "utf-8"
    )
    return 0


def noise(options: argparse.Namespace) -> int:
    """Measure honest noise of every kind, and write the atlas. Lines that were measured are kept."""
    bench = Bench(SETTINGS[options.setting], options.made)
    count, until = options.answers or bench.setting.honest_sequences, time.monotonic() + 60 * options.minutes
    kept = options.made / options.setting / f"noise-{count}.pt"
    known: dict[str, Noise] = load(kept) or {}
    for line in atlas(bench, count, known):
        if line.prover not in known:
            known[line.prover] = line
            save(kept, known)
            if time.monotonic() > until:
                print("the time is up; the same command goes on here")
                return 1
        print(f"{line.prover:<48} mismatches {line.mismatches}  margin {line.margin}", flush=True)
    found = list(known.values())
    limits = read_limits(options.into / "limits.json", options.setting)
    command = f"python -m refimpl.arena noise {options.setting}"
    text = noise_table(found, command + (f" --answers {options.answers}" if options.answers else ""), limits)
    (options.into / f"{options.setting}-noise.md").write_text(f"# Honest noise: {options.setting}\n\n{text}", "utf-8")
    write_json(options.into / f"{options.setting}-noise.json", [asdict(line) for line in found])
    return 0


def submissions(options: argparse.Namespace) -> int:
    """Every dishonest submission before the whole validator, and the table of what came of it."""
    setting = SETTINGS["tiny"]
    agreement = Agreement(
        model_path=str(setting.model_path), prompts=setting.prompts, batch=BATCH, answer_tokens_max=48
    )
    lines = list(court_table(RealEngines(agreement)))
    text = "\n".join(
        ["# Dishonest submissions", "", "`python -m refimpl.arena submissions`: the real validator.", "", *lines]
    )
    print(text)
    (options.into / "submissions.md").write_text(text + "\n", encoding="utf-8")
    return 0


OTHERS = {"cost": cost, "noise": noise, "submissions": submissions}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m refimpl.arena", description="Attacks against verifiers.")
    parser.add_argument("--made", type=Path, default=MADE, help="where sequences are kept")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="judge everything; goes on where it was ended")
    one.add_argument("setting", choices=SETTINGS)
    one.add_argument("--into", type=Path, default=RESULTS)
    one.add_argument("--only", nargs="*", help="behaviours beside the honest one (default: all)")
    one.add_argument("--minutes", type=float, default=1e6, help="begin no further cells after that long")
    one.add_argument("--kept-only", action="store_true", help="judge what was made already, make nothing")
    one.add_argument("--calibrate", action="store_true", help="set the limits anew")
    one = commands.add_parser("cost", help="what verifying costs, against a prefill and against generating")
    one.add_argument("setting", choices=SETTINGS)
    one.add_argument("--into", type=Path, default=RESULTS)
    one.add_argument("--lengths", type=int, nargs="*", default=[32, 64, 120])
    one.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    one = commands.add_parser("noise", help="the noise atlas: honest scores over everything that makes them differ")
    one.add_argument("setting", choices=SETTINGS)
    one.add_argument("--into", type=Path, default=RESULTS)
    one.add_argument("--answers", type=int, help="of each kind (the setting's number)")
    one.add_argument("--minutes", type=float, default=1e6, help="begin no further kinds after that long")
    one = commands.add_parser("submissions", help="submissions that are not one's own, not new, or not what was asked")
    one.add_argument("--into", type=Path, default=RESULTS)
    for name, says in (("regress", "compare with the baseline"), ("accept", "record a new baseline, on purpose")):
        one = commands.add_parser(name, help=says)
        one.add_argument("--into", type=Path, default=ROOT / "runs" / "regress")
        if name == "accept":
            one.add_argument("--kept", action="store_true", help="from the sequences that `run` has kept")
    options = parser.parse_args()
    set_threads()
    if options.command == "run":
        return run(options)
    if options.command in OTHERS:
        return OTHERS[options.command](options)
    return (
        regress(options.into)
        if options.command == "regress"
        else accept(options.into, options.made if options.kept else None)
    )


if __name__ == "__main__":
    sys.exit(main())
