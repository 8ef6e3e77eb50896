"""What the command line shows while it works: a bar for what is under way, a line for what is done."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from refimpl.shardcast.hoard import Hoard


class Notes:
    """The journal of one node: a line on standard output for what a person wants to know, and all of it as JSON lines
    into a file when one is asked for."""

    def __init__(self, path: Path | None, *, quiet: bool = False) -> None:
        self._file: TextIO | None = path.open("a", encoding="utf-8", buffering=1) if path is not None else None
        self._quiet = quiet
        self._began: dict[int, float] = {}

    def __call__(self, kind: str, /, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"time_s": time.time(), "kind": kind, **fields}, separators=(",", ":")) + "\n")
        if kind == "publishing":
            self._began[fields["version"]] = time.monotonic()
        sentence = self._sentence(kind, fields)
        if sentence:
            self.say(sentence)

    def say(self, sentence: str) -> None:
        if not self._quiet:
            tqdm.write(sentence, file=sys.stdout)
            sys.stdout.flush()

    def _sentence(self, kind: str, said: dict[str, Any]) -> str:
        match kind:
            case "published":
                took_s = time.monotonic() - self._began.pop(said["version"], time.monotonic())
                return f"version {said['version']} is out, cut and signed in {took_s:.2f} s"
            case "increment":
                return f"increment from version {said['base']} to {said['version']}: {said['size_bytes'] / 1e6:.3f} MB"
            case "route":
                return f"taking the increment from version {said['base']}: {said['size_bytes'] / 1e6:.3f} MB"
            case "relayed":
                return f"version {said['version']} is here, whole and verified"
            case "wrong_shard" if said["relay"]:
                return f"{said['relay']} sent a wrong shard {said['index']}; not asked again for this version"
            case "slow_relay":
                return f"{said['relay']} is too slow with shard {said['index']}: {said['what']}"
            case "empty_relay":
                return f"{said['relay']} gave nothing of version {said['version']}: {said['not_yet']} times 'not yet'"
            case "complaint":
                return f"{said['by'][:16]}… complains of {said['relay']}: wrong shard {said['index']}"
            case "abandoned":
                return f"version {said['version']} was overtaken and is given up"
            case "not_taken":
                return f"version {said['version']}: {said['reason']}"
            case "moved":
                return f"below {said['parent']} from now on, no longer below {said['before']}"
            case "disputed":
                return f"{said['source']}: {said['reason']}"
            case "problem":
                return f"{said['path']}: {said['reason']}"
        return ""


class Bar:
    """A progress bar of the version that is under way, where there is somebody to watch it."""

    def __init__(self, enabled: bool | None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bar: Any = None
        self._version: int | None = None

    def show(self, hoard: Hoard | None) -> None:
        if not self._enabled or hoard is None or hoard.published:
            self.close()
            return
        if self._version != hoard.header.version:
            self.close()
            self._version = hoard.header.version
            self._bar = tqdm(
                total=hoard.header.layout.size_bytes, unit="B", unit_scale=True, desc=f"version {self._version}"
            )
        layout = hoard.header.layout
        done = sum(
            layout.shard_size(index) if index in hoard.here else hoard.shelf.received(index)
            for index in range(layout.shard_count)
        )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._version = None, None
