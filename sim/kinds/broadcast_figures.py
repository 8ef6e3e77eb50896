"""Figures of a broadcast: when each client had which version, against the bound that no schedule beats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from sim.kinds.broadcast_checks import BroadcastFacts
from sim.scenario import Scenario


class BroadcastTally:
    """`sim.kinds.Tally` of a broadcast."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        self.name, self.part, self.bound_s = name, scenario.weights, bound_s(scenario)
        self.clients = [member.name for member in scenario.members() if member.group.role == "client"]
        self._began_s: dict[int, float] = {}
        self._ended_s: dict[int, dict[str, float]] = {}
        self._wrong: list[dict[str, Any]] = []
        self._facts = BroadcastFacts({member.name for member in scenario.members() if member.group.role == "origin"})

    def event(self, event: Mapping[str, Any]) -> None:
        self._facts.event(event)
        if event["kind"] == "publishing":
            self._began_s.setdefault(event["version"], event["t_ns"] / 1e9)
        elif event["kind"] == "complete":
            self._ended_s.setdefault(event["version"], {}).setdefault(event["node"], event["t_ns"] / 1e9)
        elif event["kind"] == "wrong_shard":
            self._wrong.append({"by": event["node"], "relay": event["relay"], "index": event["index"]})

    @property
    def versions(self) -> list[dict[str, Any]]:
        """One entry per version that was begun."""
        versions = []
        for version, start_s in sorted(self._began_s.items()):
            times = sorted(end - start_s for end in self._ended_s.get(version, {}).values())
            versions.append(
                {
                    "version": version,
                    "complete": len(times),
                    "clients": len(self.clients),
                    "first_s": times[0] if times else None,
                    "median_s": times[len(times) // 2] if times else None,
                    "last_s": times[-1] if times else None,
                    "times_s": times,
                }
            )
        return versions

    @property
    def unfinished(self) -> list[dict[str, Any]]:
        """Clients without the newest version at the end, and the reason."""
        facts = self._facts
        lack = [name for name in self.clients if facts.complete.get(name, -1) < facts.newest]
        return [{"client": name, "reason": facts.reason(name) or "none: the time was up"} for name in lack]

    def figures(self) -> dict[str, Any]:
        versions = self.versions
        return {
            "size_gb": self.part.size_gb,
            "bound_s": self.bound_s,
            "wrong_shards": self._wrong,
            "versions": versions,
            "unfinished": self.unfinished,
            **{key: versions[-1][key] if versions else None for key in ("first_s", "median_s", "last_s")},  # the newest
        }

    def table(self) -> str:
        return "\n".join(self._describe(version) for version in self.versions) or "No version was ever begun."

    def draw(self, folder: Path) -> None:
        _plot(folder / "completions.png", self)

    def page(self) -> dict[str, Any]:
        rows = [
            [str(v["version"]), f"{v['complete']} of {v['clients']}"]
            + ["–" if v[key] is None else f"{v[key]:.1f} s" for key in ("first_s", "median_s", "last_s")]
            for v in self.versions
        ]
        return {
            "tiles": {
                "one version": f"{self.part.size_gb:g} GB",
                "bandwidth-bound optimum of the median": f"{self.bound_s:.1f} s",
                "wrong shards found": str(len(self._wrong)),
            },
            "tables": [
                {"title": "Versions", "columns": ["version", "clients that have it", "first", "median", "last"],
                 "rows": rows, "classes": ["" for _ in rows]}
            ],
            "pictures": [
                {"title": "Completions", "file": "completions.png", "alt": "share of clients that have each version"}
            ],
        }  # fmt: skip

    def _describe(self, version: dict[str, Any]) -> str:
        """One version's completions in a sentence."""
        head = f"version {version['version']}: {version['complete']} of {version['clients']} clients have it"
        if not version["complete"]:
            return head
        first, median, last = (version[key] / 60 for key in ("first_s", "median_s", "last_s"))
        rate = 8 * self.part.size_gb * 1e3 / version["median_s"]
        return (
            f"{head}; first after {first:.2f} min, median {median:.2f} min ({rate:.0f} Mbit/s), last {last:.2f} min; "
            f"bandwidth-bound optimum of the median {self.bound_s / 60:.2f} min"
        )


def bound_s(scenario: Scenario) -> float:
    """No schedule brings the median client its version sooner: its own downlink, the origin's uplink once, and all that
    relays (or the origin, without relays) can send together, shared by all clients."""
    members = list(scenario.members())
    bits = 8 * scenario.weights.size_gb * 1e9
    relays = [m.group.uplink_mbit_s for m in members if m.group.role == "relay"]
    origin = [m.group.uplink_mbit_s for m in members if m.group.role == "origin"]
    downs = sorted(m.group.downlink_mbit_s for m in members if m.group.role == "client")
    senders = sum(relays) or sum(origin)
    return max(
        bits / (downs[(len(downs) - 1) // 2] * 1e6), bits / (sum(origin) * 1e6), bits * len(downs) / 2 / (senders * 1e6)
    )


def _plot(path: Path, tally: BroadcastTally) -> None:
    """Share of clients that have each version, over minutes since it began."""
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    versions = tally.versions
    for version in versions:
        times = [0.0, *(t / 60 for t in version["times_s"])]
        shares = [100 * i / max(1, version["clients"]) for i in range(len(times))]
        axis.step(times, shares, where="post", label=f"version {version['version']}")
    axis.axvline(tally.bound_s / 60, color="#222", ls="--", lw=1, label="bandwidth-bound optimum (median)")
    axis.set_xlabel("minutes since the origin began to cut the version")
    axis.set_ylabel("clients that have it, whole and verified (%)")
    axis.set_ylim(0, 103)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(f"{tally.name}: {tally.part.size_gb:g} GB to {len(tally.clients)} clients")
    figure.savefig(path, dpi=110)
    plt.close(figure)
