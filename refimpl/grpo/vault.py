"""What a trainer must not lose: rollouts that it said it took, and the weights with the books that belong to them.

    accepted/S/KEY.parquet   a verified rollout file of folder S, with KEY.json beside it: the unit as the books have it
    step_V/                  checkpoint V: weights, optimizer, books, the units that made it
    trained.jsonl            one line a version: which units made it, for the checker

Everything appears whole or not at all: files by rename, KEY.parquet after KEY.json, folders by rename. A crash between
two of these leaves less, never half. What is left over is cleaned, and cleaning never raises.

Differs from the original (prime-rl, April 2025): the run's id is in the folder, and a folder of another run is refused
(there, a fresh run in a used folder trained the old rollouts).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from refimpl.durable import sync_folder, write_whole
from refimpl.grpo.rollout import RolloutError, RolloutLimits, Sample, content_key, decode_rollouts
from refimpl.grpo.staleness import Slot, Trained, Unit
from refimpl.messages import Blob

PARTIAL = ".partial-"
WEIGHTS, MARK, STATE, BOOKS = "model.safetensors", "checkpoint.json", "optimizer.pt", "books.json"


class VaultError(Exception):
    """A folder that cannot be used. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Vault:
    """One run's folder. `keep`: checkpoints that stay. `limits`: what a rollout file may hold."""

    def __init__(self, root: Path, run_id: str, *, keep: int, limits: RolloutLimits | None = None) -> None:
        self.root, self.run_id, self.keep, self.limits = root, run_id, keep, limits or RolloutLimits()
        (root / "accepted").mkdir(parents=True, exist_ok=True)
        named = root / "run.json"
        if not named.is_file():
            _write(named, json.dumps({"run": run_id}).encode())
        found = json.loads(named.read_text(encoding="utf-8")).get("run")
        if found != run_id:
            raise VaultError(f"{root} belongs to run {found!r}, this is run {run_id!r}: take another folder")
        for partial in root.rglob(f"{PARTIAL}*"):
            _remove(partial)
        self._sequence = max((entry["sequence"] for entry in self._entries()), default=-1) + 1

    # -- rollouts --

    @staticmethod
    def key_of(file: Blob) -> str:
        """The SHA-256 of its bytes."""
        return content_key(_bytes(file))

    def read(self, file: Blob) -> list[Sample]:
        """The rows of a file that may be anything. Raises RolloutError."""
        return decode_rollouts(_bytes(file), self.limits)

    def accept(self, unit: Unit, file: Blob) -> None:
        """When this returns, the file is on disk for good. Raises OSError, and then nothing of it is there."""
        folder = self.root / "accepted" / str(unit.slot.folder)
        folder.mkdir(exist_ok=True)
        entry = {"sequence": self._sequence, "unit": asdict(unit)}
        self._sequence += 1
        note, whole = folder / f"{unit.key}.json", folder / f"{unit.key}.parquet"
        try:
            _write(note, json.dumps(entry).encode())
            _write(whole, _bytes(file))
        except OSError:
            for path in (whole, note):
                path.unlink(missing_ok=True)
            raise

    def accepted(self) -> list[Unit]:
        """All units that are on disk, in the order in which they were taken."""
        found = []
        for entry in sorted(self._entries(), key=lambda entry: int(entry["sequence"])):
            fields = entry["unit"]
            found.append(Unit(**(fields | {"slot": Slot(**fields["slot"])})))
        return found

    def _entries(self) -> list[dict[str, Any]]:
        files = sorted((self.root / "accepted").glob("*/*.parquet"))
        return [json.loads(file.with_suffix(".json").read_text(encoding="utf-8")) for file in files]

    def rollouts(self, unit: Unit) -> list[Sample]:
        """The rows of an accepted unit."""
        path = self.root / "accepted" / str(unit.slot.folder) / f"{unit.key}.parquet"
        return decode_rollouts(path.read_bytes(), self.limits)

    # -- checkpoints --

    def save(self, version: int, books: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Checkpoint `version`, which `write(folder)` fills with weights and optimizer; older ones beyond `keep` go,
        and the rollouts that all kept ones have trained."""
        final, partial = self.folder(version), self.root / f"{PARTIAL}step_{version}"
        _remove(partial)
        partial.mkdir()
        write(partial)
        _write(partial / MARK, json.dumps({"run": self.run_id, "checkpoint": version}).encode())
        _write(partial / BOOKS, json.dumps(books).encode())
        for path in partial.iterdir():
            sync_folder(path)
        sync_folder(partial)
        if final.exists():  # made again after a crash that it did not survive whole, or by a run that went back
            _remove(final)
        partial.rename(final)
        sync_folder(self.root)
        for old in self.versions()[: -self.keep]:
            _remove(self.folder(old))
        oldest = self.versions()[0]
        for folder in (self.root / "accepted").iterdir():
            if int(folder.name) < oldest:
                _remove(folder)
        return final

    def versions(self) -> list[int]:
        """Checkpoints that are here, ascending."""
        return sorted(int(path.name.removeprefix("step_")) for path in self.root.glob("step_*"))

    def folder(self, version: int) -> Path:
        return self.root / f"step_{version}"

    def books(self, version: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder(version) / BOOKS).read_text(encoding="utf-8"))
        return found

    # -- what was trained, for the checker --

    def log_trained(self, version: int, units: Sequence[Unit]) -> None:
        """Checkpoint `version` + 1 came of these."""
        line = {"version": version, "units": [[unit.key, unit.oldest_version] for unit in units]}
        with (self.root / "trained.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def trained(self) -> list[Trained]:
        """Everything trained so far, in order."""
        return [
            Trained(version=line["version"], key=key, oldest_version=oldest)
            for line in self._lines()
            for key, oldest in line["units"]
        ]

    def forget_trained(self, version: int) -> None:
        """The run goes on from checkpoint `version`: what came after it never was. A last line that a crash cut off is
        left out too."""
        lines = [line for line in self._lines() if line["version"] < version]
        _write(self.root / "trained.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def _lines(self) -> Iterable[dict[str, Any]]:
        path = self.root / "trained.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""
        return [json.loads(line) for line in whole.splitlines()]


def _bytes(file: Blob) -> bytes | memoryview:
    if file.data is None:
        raise RolloutError("the file has no bytes")
    return file.data


def _write(path: Path, data: bytes | memoryview) -> None:
    write_whole(path, data, path.with_name(f"{PARTIAL}{path.name}"))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
