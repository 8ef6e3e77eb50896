"""`python -m sim`: run scenarios and read what they left."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sim.compare import diff, replay
from sim.explain import NoRun, why
from sim.progress import Progress
from sim.real_models import model_folder, require_processes, require_use_of
from sim.scenario import ScenarioError, known_scenarios, load_scenario


def _seed(text: str) -> int:
    """A seed of the command line: a whole number, 0 or more."""
    seed = int(text)
    if seed < 0:
        raise argparse.ArgumentTypeError(f"{seed} was given; a whole number, 0 or more, was expected")
    return seed


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: done; 1: a run got stuck, broke or did not keep a promise, or two runs differ; 2: what was asked
    cannot be done, and a sentence says why."""
    parser = argparse.ArgumentParser(prog="python -m sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, text in (
        ("run", "simulate a scenario in virtual time"),
        ("swarm", "run a scenario as real processes on this machine"),
    ):
        sub = commands.add_parser(command, help=text, description=text)
        sub.add_argument("scenario", help=f"a name ({', '.join(known_scenarios())}) or a .toml file")
        sub.add_argument("--seed", type=_seed, help="instead of the scenario's own")
        sub.add_argument("--model", help="a folder or hub id, instead of the scenario's own")
        sub.add_argument("--runs", type=Path, default=Path("runs"), help="where the run's folder goes (default: runs)")
        if command == "swarm":
            text = "then simulate it too, and compare verdicts and times"
            sub.add_argument("--compare", action="store_true", help=text)
        if command == "run":
            text = "draw trace.json for Perfetto, or not (default: for few nodes)"
            sub.add_argument("--trace", action=argparse.BooleanOptionalAction, default=None, help=text)
    for command, names, text in (
        ("why", ("run",), "say who waited for whom in a run, from when, on what link or device"),
        ("diff", ("run_a", "run_b"), "show the first event where two runs part, and the figures that differ"),
        ("replay", ("run",), "run a run again, and say whether it is the same"),
    ):
        sub = commands.add_parser(command, help=text, description=text)
        for name in names:
            sub.add_argument(name, type=Path, help="the folder of a run")
    text = "run a scenario with several values of its fields and several seeds, over all cores"
    sub = commands.add_parser("sweep", help=text, description=text)
    sub.add_argument("scenario", help="a name or a .toml file")
    sub.add_argument(
        "--set", action="append", default=[], metavar="FIELD=V1,V2", help="e.g. links.downlink_mbit_s=50,100,200"
    )
    sub.add_argument("--seeds", type=int, default=5, help="runs per combination (default: 5)")
    sub.add_argument("--figures", default=None, help="comma-separated paths into summary.json")
    sub.add_argument("--jobs", type=int, default=-1, help="processes (default: one a core)")
    sub.add_argument("--dask", help="address of a Dask scheduler, to run on its workers")
    sub.add_argument("--model", help="a folder or hub id, instead of the scenario's own")
    sub.add_argument("--runs", type=Path, default=Path("runs"), help="where the folders go (default: runs)")
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except (ScenarioError, NoRun) as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    scenario = load_scenario(options.scenario)
    require_use_of(options.model, scenario)
    seed = scenario.seed if options.seed is None else options.seed
    name = Path(options.scenario).stem
    with Progress(name) as shown:
        shown.turn_to("getting ready")
        # imported here: a bad scenario is refused at once, without waiting for what runs it
        from sim.run import run_scenario

        path = model_folder(scenario, options.model)
    result = run_scenario(scenario, name=name, seed=seed, model_path=path, runs=options.runs, trace=options.trace)
    return 0 if result.ok else 1


def _swarm(options: argparse.Namespace) -> int:
    scenario = load_scenario(options.scenario)
    require_processes(scenario)
    seed = scenario.seed if options.seed is None else options.seed
    name = Path(options.scenario).stem
    # imported here: a bad scenario is refused at once, without waiting for what runs it
    if options.compare:
        from sim.likeness import compare_worlds

        path = model_folder(scenario, options.model)
        return 0 if compare_worlds(scenario, name=name, seed=seed, model_path=path, runs=options.runs).alike else 1
    from sim.processes import run_processes

    path = model_folder(scenario, options.model)
    return 0 if run_processes(scenario, name=f"swarm-{name}", seed=seed, model_path=path, runs=options.runs).ok else 1


def _why(options: argparse.Namespace) -> int:
    print(why(options.run))
    return 0


def _diff(options: argparse.Namespace) -> int:
    same, text = diff(options.run_a, options.run_b)
    print(text)
    return 0 if same else 1


def _replay(options: argparse.Namespace) -> int:
    same, text = replay(options.run)
    print(text)
    return 0 if same else 1


def _sweep(options: argparse.Namespace) -> int:
    from sim.sweep import parse_setting, sweep

    _, kept = sweep(
        options.scenario,
        [parse_setting(text) for text in options.set],
        seeds=options.seeds,
        runs=options.runs,
        figures=options.figures.split(",") if options.figures else None,
        jobs=options.jobs,
        dask=options.dask,
        model=options.model,
    )
    return 0 if kept else 1


COMMANDS = {"sweep": _sweep, "run": _run, "swarm": _swarm, "why": _why, "diff": _diff, "replay": _replay}

if __name__ == "__main__":
    sys.exit(main())
