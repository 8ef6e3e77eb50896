"""How small is an increment between real consecutive checkpoints, and how fast is it made and applied?

    python -m experiments.bench.shardcast_delta          # SmolLM2 and the tiny model, learning rates 3e-7 and 1e-6
    python -m experiments.bench.shardcast_delta --models DIR … --learning-rates 3e-7 --starts spread

Trains each model for a few versions (`experiments/shardcast/checkpoints.py`; kept under build/, so that a second run
only measures), then for each pair of neighbours: the share of weights that changed; the size of the increment by each
way of coding it; the speed of making it, of decoding it, and of the client's whole path (decode, write, SHA-256 per
shard, all on disk and verified). Every result is compared with the target bit for bit before a figure is printed.

Speeds are bytes of *weights* per second of this thread's CPU time (one core; a busy machine stretches wall time, not
this), the median of the repetitions. Leaves results/shardcast_delta.md and .json beside this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from experiments.shardcast.checkpoints import make_checkpoints
from refimpl.shardcast.assembly import Assembly
from refimpl.shardcast.delta import CHUNK_BYTES, IncrementDecoder, encode_increment, plan_chunks
from refimpl.shardcast.delta_codec import encode_planes
from refimpl.shardcast.delta_sparse import encode_sparse, exponent_classes
from refimpl.shardcast.increment import IncrementApplier
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Header, Manifest
from refimpl.shardcast.store import VersionStore
from refimpl.shardcast.tensors import spans

HERE = Path(__file__).resolve().parent
BUILD = Path("build/checkpoints")
NO_CLASSES = np.zeros(512, np.uint8)
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


def measure_pair(base_path: Path, target_path: Path, repetitions: int) -> dict[str, Any]:
    old, new = np.fromfile(base_path, np.uint8), np.fromfile(target_path, np.uint8)
    layouts = [Layout(names=("model.safetensors",), sizes_bytes=(data.size,)) for data in (old, new)]

    def read_old(offset: int, size: int) -> memoryview:
        return old[offset : offset + size].data

    def read_new(offset: int, size: int) -> memoryview:
        return new[offset : offset + size].data

    def encode() -> bytes:
        chunks = plan_chunks(spans(layouts[0], read_old), spans(layouts[1], read_new))
        return b"".join(encode_increment(read_old, old.size, read_new, new.size, chunks))

    def decode() -> None:
        decoder, at = IncrementDecoder(read_old, old.size, new.size), 0
        for start in range(0, len(increment), 1 << 20):
            for piece in decoder.feed(increment[start : start + (1 << 20)]):
                out[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
        decoder.finish()

    increment, out = encode(), np.empty_like(new)  # compiles on the way
    decode()
    assert np.array_equal(out, new), "the increment does not give the target back"
    times: dict[str, list[float]] = {"encode": [], "decode": [], "apply": []}
    for _ in range(repetitions):
        times["encode"].append(cpu_s(encode)[0])
        times["decode"].append(cpu_s(decode)[0])
        times["apply"].append(apply_on_disk(base_path, target_path, increment, layouts))
    speeds = {f"{name}_mb_s": new.size / 1e6 / statistics.median(values) for name, values in times.items()}
    elements = [data[data.size % 2 :].view(np.uint16) for data in (old, new)] if old.size == new.size else None
    assert elements is not None, "two versions of one model have one size"
    changed = elements[0] != elements[1]
    return {
        "bytes": int(new.size),
        "increment_bytes": len(increment),
        "ratio": new.size / len(increment),
        "changed_share": float(changed.mean()),
        "one_unit_share": float((np.abs((elements[1] - elements[0]).view(np.int16)[changed].astype(int)) == 1).mean()),
        **speeds,
        "coders": compare_coders(*elements),
    }


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


def apply_on_disk(base_path: Path, target_path: Path, increment: bytes, layouts: list[Layout]) -> float:
    """CPU seconds of a client's path: base read from disk, increment decoded, shards written, hashed, compared."""
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        store, manifests = VersionStore(Path(folder)), []
        for version, (path, layout) in enumerate(zip((base_path, target_path), layouts, strict=True), 1):
            header = Header(run_id="bench", version=version, layout=layout, origin="00" * 32)
            root = store.root if version == 1 else Path(folder) / "origin"
            assembly = Assembly(root, header, sources=[path])
            shards = [digest for _, digest in assembly.cut()]
            manifests.append(Manifest(header=header, files_sha256=assembly.files_sha256, shards_sha256=tuple(shards)))
            assembly.finish(manifests[-1], durable=False)
        assembly = store.begin(manifests[1].header)
        began_s = time.thread_time()
        applier = IncrementApplier(store, manifests[0], manifests[1], assembly)
        for start in range(0, len(increment), 1 << 20):
            applier.feed(increment[start : start + (1 << 20)])
        applier.finish()
        spent_s = time.thread_time() - began_s
        assert applier.bad == [] and assembly.missing() == []
        folder_of_target = assembly.finish(manifests[1], durable=False)
        assert (folder_of_target / "model.safetensors").read_bytes() == target_path.read_bytes()
    return spent_s


def hashing_mb_s() -> float:
    data = bytes(1 << 26)
    return len(data) / 1e6 / statistics.median(cpu_s(lambda: hashlib.sha256(data).digest())[0] for _ in range(3))


def render(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    lines = [
        "# Increments between real consecutive checkpoints",
        "",
        f"`python -m experiments.bench.shardcast_delta`, {machine['cpu']}, one core, SHA-256 "
        f"{machine['sha256_mb_s']:.0f} MB/s, load average {machine['load']:.1f}. Speeds: MB (10^6 bytes) of weights "
        "per CPU second, median.",
        "Eight AdamW steps per version; start of the master weights: see experiments/shardcast/checkpoints.py.",
        "",
        "| model | learning rate | start | versions | weights changed | of these by one unit | weights MB "
        "| increment MB | ratio | encode MB/s | decode MB/s | apply on disk, verified MB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['learning_rate']:g} | {row['start']} | {row['pair']} "
            f"| {100 * row['changed_share']:.2f} % | {100 * row['one_unit_share']:.0f} % | {row['bytes'] / 1e6:.1f} "
            f"| {row['increment_bytes'] / 1e6:.3f} | {row['ratio']:.1f} | {row['encode_mb_s']:.0f} "
            f"| {row['decode_mb_s']:.0f} | {row['apply_mb_s']:.0f} |"
        )
    lines += ["", "## Ways to code the same difference (4 MiB chunks): ratio, and encoding speed in MB/s", ""]
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
                        f"decode {row['decode_mb_s']:.0f}, apply {row['apply_mb_s']:.0f} MB/s",
                        flush=True,
                    )
    machine = {"cpu": cpu_name(), "sha256_mb_s": hashing_mb_s(), "load": os.getloadavg()[0]}
    options.into.mkdir(exist_ok=True)
    (options.into / "shardcast_delta.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    table = render(rows, machine)
    (options.into / "shardcast_delta.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
