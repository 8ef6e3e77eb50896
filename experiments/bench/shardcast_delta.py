"""How small is an increment between real consecutive checkpoints, and how fast is it made and applied?

    python -m experiments.bench.shardcast_delta          # SmolLM2 and the tiny model, learning rates 3e-7 and 1e-6
    python -m experiments.bench.shardcast_delta --models DIR … --learning-rates 3e-7 --starts spread

Trains each model for a few versions (`experiments/shardcast/checkpoints.py`; kept under build/, so that a second run
only measures), then for each pair of neighbours: the share of weights that changed; the size of the increment by each
way of coding it; the speed of the origin's path (both versions read from files, compared, written), of decoding alone,
and of the client's path (base and increment read, decoded, written, SHA-256 per shard, verified). Every result is
compared with the target bit for bit before a figure is printed.

Speeds are bytes of *weights* per second of CPU time (one core; a busy machine stretches wall time, not this), the
median of the repetitions; "in hashes" is the same in units of SHA-256 over the same bytes in the same run, which is how
the simulator prices it. The gain of two cores is in wall time, so it means something on a quiet machine only. Leaves
results/shardcast_delta.md and .json beside this file.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from experiments.shardcast.checkpoints import make_checkpoints
from refimpl.shardcast.assembly import Assembly
from refimpl.shardcast.delta import CHUNK_BYTES, IncrementDecoder, encode_increment, plan_chunks
from refimpl.shardcast.delta_codec import encode_planes
from refimpl.shardcast.delta_sparse import encode_sparse, exponent_classes
from refimpl.shardcast.increment import Applier, Comparison
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Header, Manifest, Stretch, increment_header
from refimpl.shardcast.shelf import increment_layout
from refimpl.shardcast.store import VersionStore
from refimpl.shardcast.tensors import spans

HERE = Path(__file__).resolve().parent
BUILD = Path("build/checkpoints")
NO_CLASSES = np.zeros(512, np.uint8)
SHARD_BYTES = 16_000_000
WORKERS = (1, 2)
Coder = Callable[[np.ndarray, np.ndarray], int]


def zstd(data: Any) -> int:
    return len(pa.Codec("zstd", compression_level=1).compress(np.ascontiguousarray(data), asbytes=True))


def xor_bit_planes(old: np.ndarray, new: np.ndarray) -> int:
    changed = old ^ new
    return sum(zstd(np.packbits((changed >> bit).astype(np.uint8) & 1)) for bit in range(16))


def xor_byte_planes(old: np.ndarray, new: np.ndarray) -> int:
    planes = (old ^ new).view(np.uint8).reshape(-1, 2)
    return zstd(planes[:, 0]) + zstd(planes[:, 1])


def sparse(old: np.ndarray, new: np.ndarray, class_of: np.ndarray) -> int:
    payload = encode_sparse(old, new, class_of)
    return new.nbytes if payload is None else len(payload)


CODERS: dict[str, Coder] = {
    "no base, zstd": lambda old, new: zstd(new),
    "xor, zstd": lambda old, new: zstd(old ^ new),
    "xor, byte planes, zstd": xor_byte_planes,
    "xor, bit planes, zstd": xor_bit_planes,
    "difference, byte planes, zstd": lambda old, new: len(encode_planes(old, new)),
    "gaps, one class": lambda old, new: sparse(old, new, NO_CLASSES),
    "gaps by exponent (ours)": lambda old, new: sparse(old, new, exponent_classes("BF16")),
}


def cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.thread_time()
    result = work()
    return time.thread_time() - began_s, result


class Pair:
    """Two neighbours in a store, and a client that has the first."""

    def __init__(self, folder: Path, paths: tuple[Path, Path]) -> None:
        self.folder, self.store, self.manifests = folder, VersionStore(folder / "store"), []
        for version, path in enumerate(paths, 1):
            layout = Layout(names=("model.safetensors",), sizes_bytes=(path.stat().st_size,), shard_bytes=SHARD_BYTES)
            header = Header(run_id="bench", version=version, layout=layout, origin="00" * 32)
            self.manifests.append(self._keep(header, path))
        base, target = self.manifests
        self.every = Stretch(0, target.layout.shard_count)
        reads = [self.store.reader(manifest) for manifest in self.manifests]
        self.comparison = Comparison(reads[0], base.layout, reads[1], target.layout)
        size = self.encode(1)
        header = increment_header(base, target.header, self.every, increment_layout(size, SHARD_BYTES))
        self.increment = self._keep(header, folder / "increment")

    def _keep(self, header: Header, path: Path) -> Manifest:
        assembly = Assembly(self.store.root, header, sources=[path], copy=True)
        manifest = Manifest(header=header, shards_sha256=tuple(digest for _, digest in assembly.cut()))
        assembly.finish(manifest, durable=False)
        return manifest

    def encode(self, workers: int) -> int:
        return self.comparison.write(self.every, self.folder / "increment", workers)

    def apply(self, workers: int) -> Timing:
        base, target = self.manifests
        client = self.folder / "client"
        assembly = Assembly(client, target.header)
        locks = [threading.Lock() for _ in self.every.shards]
        applier = Applier(self.store, base, dict(enumerate(target.shards_sha256)), assembly, locks)
        took, bad = timed(lambda: applier.apply([self.increment], workers))
        assert bad == [] and assembly.missing() == []
        made = assembly.finish(target, durable=False)
        files = [folder / "model.safetensors" for folder in (made, self.store.folder(target))]
        assert filecmp.cmp(*files, shallow=False), "the increment does not give the target back"
        shutil.rmtree(client)
        return took


class Timing(NamedTuple):
    wall_s: float
    cpu_s: float  # of all threads


def timed(work: Callable[[], Any]) -> tuple[Timing, Any]:
    wall_s, used_s = time.perf_counter(), time.process_time()
    result = work()
    return Timing(time.perf_counter() - wall_s, time.process_time() - used_s), result


def measure_pair(base_path: Path, target_path: Path, repetitions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        pair = Pair(Path(folder), (base_path, target_path))
        pair.apply(1)  # compiles on the way
        encode: dict[int, list[Timing]] = {workers: [] for workers in WORKERS}
        apply: dict[int, list[Timing]] = {workers: [] for workers in WORKERS}
        hashing = []
        for _ in range(repetitions):
            for workers in WORKERS:
                encode[workers].append(timed(partial(pair.encode, workers))[0])
                apply[workers].append(pair.apply(workers))
            hashing.append(hashing_mb_s())
        increment_bytes = pair.increment.layout.size_bytes
    old, new = np.fromfile(base_path, np.uint8), np.fromfile(target_path, np.uint8)
    assert old.size == new.size, "two versions of one model have one size"
    elements = [data[data.size % 2 :].view(np.uint16) for data in (old, new)]
    changed = elements[0] != elements[1]
    speeds = {
        f"{name}_mb_s": new.size / 1e6 / statistics.median(timing.cpu_s for timing in timings[1])
        for name, timings in (("encode", encode), ("apply", apply))
    }
    speeds["decode_mb_s"] = new.size / 1e6 / decode_s(old, new, repetitions)
    sha256_mb_s = statistics.median(hashing)
    return {
        "bytes": int(new.size),
        "increment_bytes": increment_bytes,
        "ratio": new.size / increment_bytes,
        "changed_share": float(changed.mean()),
        "one_unit_share": float((np.abs((elements[1] - elements[0]).view(np.int16)[changed].astype(int)) == 1).mean()),
        **speeds,
        "sha256_mb_s": sha256_mb_s,
        "encode_hashes": sha256_mb_s / speeds["encode_mb_s"],
        "apply_hashes": sha256_mb_s / speeds["apply_mb_s"],
        "encode_gain": gain(encode),
        "apply_gain": gain(apply),
        "coders": compare_coders(*elements),
    }


def gain(timings: dict[int, list[Timing]]) -> float:
    """How many times faster two workers are than one, in wall time."""
    one, two = (statistics.median(timing.wall_s for timing in timings[workers]) for workers in WORKERS)
    return one / two


def decode_s(old: np.ndarray, new: np.ndarray, repetitions: int) -> float:
    """CPU seconds of decoding from memory into memory."""
    layout = Layout(names=("model.safetensors",), sizes_bytes=(new.size,))

    def read_old(offset: int, size: int) -> memoryview:
        return old[offset : offset + size].data

    def read_new(offset: int, size: int) -> memoryview:
        return new[offset : offset + size].data

    chunks = plan_chunks(spans(layout, read_old), spans(layout, read_new))
    increment, out = b"".join(encode_increment(read_old, old.size, read_new, new.size, chunks)), np.empty_like(new)

    def decode() -> None:
        decoder, at = IncrementDecoder(read_old, old.size, new.size), 0
        for start in range(0, len(increment), 1 << 20):
            for piece in decoder.feed(increment[start : start + (1 << 20)]):
                out[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
        decoder.finish()

    took = [cpu_s(decode)[0] for _ in range(repetitions)]
    assert np.array_equal(out, new), "the increment does not give the target back"
    return statistics.median(took)


def compare_coders(old: np.ndarray, new: np.ndarray) -> dict[str, dict[str, float]]:
    """Every coding on the same chunks: ratio and speed of encoding."""
    found, step = {}, CHUNK_BYTES // 2
    for name, coder in CODERS.items():
        coder(old[:64].copy(), new[:64].copy())
        spent_s, size = cpu_s(
            lambda coder=coder: sum(  # type: ignore[misc]
                coder(old[at : at + step], new[at : at + step]) for at in range(0, old.size, step)
            )
        )
        found[name] = {"ratio": new.nbytes / size, "encode_mb_s": new.nbytes / 1e6 / spent_s}
    return found


def hashing_mb_s() -> float:
    data = bytes(1 << 26)
    return len(data) / 1e6 / statistics.median(cpu_s(lambda: hashlib.sha256(data).digest())[0] for _ in range(3))


def render(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    lines = [
        "# Increments between real consecutive checkpoints",
        "",
        f"`python -m experiments.bench.shardcast_delta`, {machine['cpu']}, SHA-256 {machine['sha256_mb_s']:.0f} MB/s, "
        f"load average {machine['load']:.1f}. Speeds: MB (10^6 bytes) of weights per CPU second on one core, "
        f"median; in hashes: CPU time over that of SHA-256 over the same bytes; gain: wall time on one core over "
        f"that on two ({machine['repetitions']} repetitions).",
        "Eight AdamW steps per version; start of the master weights: see experiments/shardcast/checkpoints.py.",
        "",
        "| model | learning rate | start | versions | weights changed | of these by one unit | weights MB "
        "| increment MB | ratio | encode from disk MB/s | in hashes | gain | decode MB/s "
        "| apply on disk, verified MB/s | in hashes | gain |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['learning_rate']:g} | {row['start']} | {row['pair']} "
            f"| {100 * row['changed_share']:.2f} % | {100 * row['one_unit_share']:.0f} % | {row['bytes'] / 1e6:.1f} "
            f"| {row['increment_bytes'] / 1e6:.3f} | {row['ratio']:.1f} | {row['encode_mb_s']:.0f} "
            f"| {row['encode_hashes']:.2f} | {row['encode_gain']:.2f} | {row['decode_mb_s']:.0f} "
            f"| {row['apply_mb_s']:.0f} | {row['apply_hashes']:.2f} | {row['apply_gain']:.2f} |"
        )
    lines += [
        "",
        f"## Ways to code the same difference (chunks of {CHUNK_BYTES >> 20} MiB): ratio, and encoding speed in MB/s",
        "",
    ]
    lines += [
        "| model, learning rate, start, versions | " + " | ".join(CODERS) + " |",
        "|---" * (len(CODERS) + 1) + "|",
    ]
    for row in rows:
        cells = [f"{row['coders'][name]['ratio']:.1f} ({row['coders'][name]['encode_mb_s']:.0f})" for name in CODERS]
        label = f"{row['model']}, {row['learning_rate']:g}, {row['start']}, {row['pair']}"
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, nargs="+", default=[Path("models/SmolLM2-135M-Instruct"), Path("tests/data/tiny-model")]
    )
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-7, 1e-6])
    parser.add_argument("--starts", nargs="+", choices=["grid", "spread"], default=["spread", "grid"])
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--into", type=Path, default=HERE / "results")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for learning_rate in options.learning_rates:
            for start in options.starts:
                folder = BUILD / f"{model.name}-{learning_rate:g}-{start}"
                paths = make_checkpoints(
                    model, folder, learning_rate=learning_rate, versions=options.versions, start=start
                )
                for version in range(options.versions):
                    row = measure_pair(paths[version], paths[version + 1], options.repetitions)
                    row |= {"model": model.name, "learning_rate": learning_rate, "start": start}
                    row["pair"] = f"{version} → {version + 1}"
                    rows.append(row)
                    print(
                        f"{model.name} {learning_rate:g} {start} {row['pair']}: ratio {row['ratio']:.1f}, "
                        f"{100 * row['changed_share']:.2f} % changed, encode {row['encode_mb_s']:.0f}, "
                        f"decode {row['decode_mb_s']:.0f}, apply {row['apply_mb_s']:.0f} MB/s; in hashes "
                        f"{row['encode_hashes']:.2f} and {row['apply_hashes']:.2f}; gain of two cores "
                        f"{row['encode_gain']:.2f} and {row['apply_gain']:.2f}",
                        flush=True,
                    )
    machine = {
        "cpu": cpu_name(), "sha256_mb_s": hashing_mb_s(), "load": os.getloadavg()[0],
        "repetitions": options.repetitions,
    }  # fmt: skip
    options.into.mkdir(exist_ok=True)
    (options.into / "shardcast_delta.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    table = render(rows, machine)
    (options.into / "shardcast_delta.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
