"""How a client gets from what it has to the newest version soonest: a chain of increments, or the whole file.

Downloads follow one another on the client's link; an increment is applied while it arrives, but not before its base is
complete. With link and disk as two machines,

    link_k = link_{k-1} + rtt + bytes_k / rate
    done_k = max(link_k, max(done_{k-1}, link_{k-1} + rtt) + target bytes / apply rate)      (increment)
    done_k = link_k                                                                         (whole file)

and the route with the smallest last `done` wins. All pairs (link, done) that no other route to the same version beats
in both are kept on the way, so the answer is exact for this model, whatever increments there are (from any version to
any later one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What this client can do, as measured (see `RelayChoice.expected_s`)."""

    download_bytes_per_s: float
    apply_bytes_per_s: float = 300e6  # of the target, increment decoded and hashed
    rtt_s: float = 0.1

    def __post_init__(self) -> None:
        if not (self.download_bytes_per_s > 0 and self.apply_bytes_per_s > 0 and self.rtt_s >= 0):
            raise ValueError(f"speeds must be positive: {self}")


@dataclass(frozen=True)
class Leg:
    """One payload to fetch: the whole `target` (base None), or the increment from `base` to it."""

    base: int | None
    target: int
    size_bytes: int


@dataclass(frozen=True)
class Route:
    """What to fetch, in order, and when it is expected to be complete (seconds from now)."""

    legs: tuple[Leg, ...]
    finish_s: float

    @property
    def size_bytes(self) -> int:
        return sum(leg.size_bytes for leg in self.legs)


@dataclass(frozen=True)
class _Label:
    link_s: float
    done_s: float
    legs: tuple[Leg, ...]


def plan_route(
    have: int | None,
    newest: int,
    full_bytes: Mapping[int, int],
    increment_bytes: Mapping[tuple[int, int], int],
    speeds: Speeds,
) -> Route | None:
    """The soonest way from version `have` (None: nothing) to `newest`. `full_bytes`: size of each version;
    `increment_bytes`: size of the increments on offer, by (base, target). None: there is no way (yet)."""
    if have == newest:
        return Route((), 0.0)
    labels: dict[int, list[_Label]] = {}
    if have is not None:
        labels[have] = [_Label(0.0, 0.0, ())]
    for version in sorted({*full_bytes, *(target for _, target in increment_bytes)}):
        if version > newest or version == have:
            continue
        if version in full_bytes:
            leg = Leg(None, version, full_bytes[version])
            link_s = speeds.rtt_s + leg.size_bytes / speeds.download_bytes_per_s
            _keep(labels, version, _Label(link_s, link_s, (leg,)))
        for (base, target), size in increment_bytes.items():
            if target == version and base < target and target in full_bytes:
                for label in labels.get(base, ()):
                    _keep(labels, version, _after(label, Leg(base, target, size), full_bytes[target], speeds))
    arrived = labels.get(newest)
    if not arrived:
        return None
    best = min(arrived, key=lambda label: (label.done_s, label.link_s, len(label.legs)))
    return Route(best.legs, best.done_s)


def _after(label: _Label, leg: Leg, target_bytes: int, speeds: Speeds) -> _Label:
    first_byte_s = label.link_s + speeds.rtt_s
    link_s = first_byte_s + leg.size_bytes / speeds.download_bytes_per_s
    done_s = max(link_s, max(label.done_s, first_byte_s) + target_bytes / speeds.apply_bytes_per_s)
    return _Label(link_s, done_s, (*label.legs, leg))


def _keep(labels: dict[int, list[_Label]], version: int, new: _Label) -> None:
    others = labels.setdefault(version, [])
    if any(old.link_s <= new.link_s and old.done_s <= new.done_s for old in others):
        return
    others[:] = [old for old in others if not (new.link_s <= old.link_s and new.done_s <= old.done_s)]
    others.append(new)
