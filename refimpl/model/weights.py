"""Checkpoints in and out: a chosen layer range of sharded safetensors, without reading the rest.

A stage of a pipeline holds some layers of a model that fits no single machine, so it must not touch the others' bytes:
tensors are read from the shards that hold them, cast, and put straight into the joined matrices. A shard is mapped only
while a few megabytes are copied out of it, so the memory used stays close to that of the weights held.

Names inside a file are those of transformers' Llama, Qwen2 and Qwen3; `refimpl/model/transformer.py` says which of them
are joined here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from refimpl.model.attention import AttentionKernel
from refimpl.model.config import ModelConfig
from refimpl.model.transformer import Decoder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE_BYTES = 4 << 20  # of a tensor are mapped at a time
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class WeightsError(ValueError):
    """A checkpoint that cannot be used. Takes exactly one argument: the sentence that names file, tensor, fault."""


# A parameter of one layer -> the tensors of the checkpoint that are joined into it, row under row.
LAYER_TENSORS: dict[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}


def load_decoder(
    path: str | Path,
    *,
    layers: range | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "auto",
    attention: AttentionKernel = "sdpa",
) -> Decoder:
    """The decoder of the checkpoint folder `path`, or only its `layers`.

    `device` is a torch device, or "auto": a GPU if there is one. Raises `ConfigError` or `WeightsError` with the file
    and what is wrong with it.
    """
    folder = Path(path)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    config = ModelConfig.from_pretrained(folder)
    decoder = Decoder(config, layers=layers, attention=attention, dtype=dtype, device=place)
    shards = _Shards(folder)
    with torch.no_grad():
        for name, tensors in parameter_tensors(decoder).items():
            shards.read_into(decoder.get_parameter(name), tensors)
    shards.close()
    return decoder.eval()


def random_decoder(config: ModelConfig, *, seed: int, std: float = 0.02, dtype: torch.dtype = torch.float32) -> Decoder:
    """An untrained decoder: matrices from N(0, std²), norms 1, biases 0; the same for the same seed."""
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, std, generator=generator)
    return decoder.to(dtype)


def parameter_tensors(decoder: Decoder) -> dict[str, tuple[str, ...]]:
    """Each parameter that `decoder` holds -> the names of its tensors in a checkpoint. A tied matrix is named once."""
    names: dict[str, tuple[str, ...]] = {}
    for name, _ in decoder.named_parameters():
        if name.startswith("layers."):
            _, index, part = name.split(".", 2)
            prefix = f"model.layers.{decoder.layer_range.start + int(index)}."
            names[name] = tuple(prefix + tensor for tensor in LAYER_TENSORS[part])
        else:
            head = EMBEDDING if decoder.config.tied_head else HEAD
            names[name] = ({"embedding": EMBEDDING, "norm": NORM, "head": head}[name],)
    return names


def checkpoint_tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The weights under the names and in the shapes of a checkpoint. Views of the decoder's memory, not copies."""
    c = decoder.config
    q, kv = c.query_heads * c.head_dim, c.kv_heads * c.head_dim
    tensors: dict[str, torch.Tensor] = {}
    for name, names in parameter_tensors(decoder).items():
        value = decoder.get_parameter(name).detach()
        rows = {1: [value.shape[0]], 2: [c.intermediate] * 2, 3: [q, kv, kv]}[len(names)]
        tensors.update(zip(names, value.split(rows), strict=True))
    return tensors


def load_tensors(decoder: Decoder, tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite `decoder`'s weights in place with those of a checkpoint: a new version of the same model.

    Every tensor must be there in its right shape, or `WeightsError` is raised and nothing has been changed.
    """
    wanted = checkpoint_tensors(decoder)
    for name, target in wanted.items():
        if name not in tensors:
            raise WeightsError(f"tensor {name} is missing")
        if tensors[name].shape != target.shape:
            raise WeightsError(f"tensor {name} is {tuple(tensors[name].shape)}, expected {tuple(target.shape)}")
    with torch.no_grad():
        for name, target in wanted.items():
            target.copy_(tensors[name])


def save_checkpoint(decoder: Decoder, path: str | Path) -> Path:
    """Write a whole model as a folder that transformers and `load_decoder` read: config.json, model.safetensors."""
    if not (decoder.first and decoder.last):
        raise ValueError(f"decoder holds layers {decoder.layer_range}, expected all {decoder.config.layers}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in checkpoint_tensors(decoder).items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    fields = {**decoder.config.to_json(), "dtype": str(decoder.dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return folder


def content_hash(path: str | Path) -> str:
    """SHA-256 (hex) of what a checkpoint computes with: config, and each tensor's name, dtype, shape and bytes.

    How the tensors are spread over shards, and what else the files say, does not matter.
    """
    folder = Path(path)
    digest = hashlib.sha256(ModelConfig.from_pretrained(folder).fingerprint().encode())
    shards = _Shards(folder)
    for name in shards.names():
        shape, dtype = shards.shape_and_dtype(name)
        digest.update(f"\n{name} {dtype} {shape}\n".encode())
        for piece in shards.pieces(name):
            digest.update(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    shards.close()
    return digest.hexdigest()


class _Shards:
    """The safetensors files of a folder, one mapped at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[str, safe_open] | None = None
        index = folder / INDEX
        self._files: dict[str, str] | None = None
        if index.is_file():
            try:
                self._files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise WeightsError(f"{index} is not an index of shards: {error!r}") from None
        elif not (folder / SINGLE).is_file():
            raise WeightsError(f"{folder} holds neither {SINGLE} nor {INDEX}")

    def names(self) -> list[str]:
        """All tensors of the checkpoint, sorted."""
        return sorted(self._files if self._files is not None else self._shard(SINGLE).keys())

    def tensor(self, name: str) -> torch.Tensor:
        return self._slice(name)[:]

    def _slice(self, name: str) -> Any:
        """A tensor of the mapped file: shape without reading, rows by slicing."""
        file = SINGLE if self._files is None else self._files.get(name)
        if file is None:
            raise WeightsError(f"{self._folder / INDEX} names no shard for tensor {name}")
        try:
            return self._shard(file).get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{self._folder / file}: tensor {name}: {error}") from None

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        part = self._slice(name)
        return tuple(part.get_shape()), part[:0].dtype if part.get_shape() else self.tensor(name).dtype

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor, some rows at a time; nothing stays mapped: mapped pages count as the process's memory."""
        shape = self._slice(name).get_shape()
        if not shape:
            yield self.tensor(name)
            return
        step = max(1, PIECE_BYTES // (4 * max(1, math.prod(shape[1:]))))
        for start in range(0, shape[0], step):
            yield self._slice(name)[start : start + step]
            self.close()

    def read_into(self, target: torch.Tensor, names: tuple[str, ...]) -> None:
        """Fill `target` with these tensors, row under row."""
        row = 0
        for name in names:
            shape = self._slice(name).get_shape()
            if shape[1:] != list(target.shape[1:]) or row + shape[0] > target.shape[0]:
                raise WeightsError(f"{self._folder}: tensor {name} is {tuple(shape)}, which does not fit config.json")
            step = max(1, PIECE_BYTES // (4 * math.prod(shape[1:])))
            for start in range(0, shape[0], step):
                stop = min(start + step, shape[0])
                target[row + start : row + stop].copy_(self._slice(name)[start:stop])
                self.close()  # unmap: pages of a mapped file count as memory of this process
            row += shape[0]
        if row != target.shape[0]:
            raise WeightsError(f"{self._folder}: {', '.join(names)} have {row} rows, expected {target.shape[0]}")

    def close(self) -> None:
        self._open = None

    def _shard(self, file: str) -> safe_open:
        if self._open is None or self._open[0] != file:
            self._open = None
            try:
                self._open = file, safe_open(self._folder / file, framework="pt", device="cpu")
            except FileNotFoundError:
                raise WeightsError(f"{self._folder / file} does not exist, but the index names it") from None
            except SafetensorError as error:
                raise WeightsError(f"{self._folder / file} is not a safetensors file: {error}") from None
        return self._open[1]
