"""Makes the calibrated engine's table from runs with the real engine: what the validator saw of each behaviour.

    make sim SCENARIO=toploc-alone
    python experiments/calibrate_scores.py runs/toploc-alone-1 [more runs] --into sim/tables/smollm2.json

Several runs add up. The table names the runs and the hash of each log.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout too

from sim.record import read_events


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    behaviours: dict[str, list[dict[str, object]]] = {}
    sources = []
    for run in options.runs:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        behaviour_of = summary["behaviour_of"]
        sources.append(
            {
                "scenario": summary["scenario"],
                "seed": summary["seed"],
                "model": summary["plan"]["agreement"]["model_path"],
                "events_sha256": summary["events_sha256"],
            }
        )
        worker_of: dict[str, str] = {}
        for event in read_events(run / "events.jsonl"):
            if event["kind"] == "registered":
                worker_of[event["public_key"]] = event["worker"]
            elif event["kind"] == "judged" and event["decided"]:
                scores = zip(event["mismatches"], event["mean_errors"], event["median_errors"], strict=True)
                entry = {"code": event["code"], "chunks": [list(chunk) for chunk in scores]}
                behaviours.setdefault(behaviour_of[worker_of[event["public_key"]]], []).append(entry)
    table = {
        "made_by": "experiments/calibrate_scores.py",
        "columns": ["mismatches of 128", "mean error (ulp)", "median error (ulp)"],
        "sources": sources,
        "behaviours": dict(sorted(behaviours.items())),
    }
    options.into.parent.mkdir(parents=True, exist_ok=True)
    options.into.write_text(json.dumps(table, separators=(",", ":")) + "\n", encoding="utf-8")
    for name, entries in sorted(behaviours.items()):
        print(f"{name:<20}{len(entries):>5} submissions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
