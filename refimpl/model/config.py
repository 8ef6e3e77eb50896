"""What a decoder of the Llama family is made of, read from a checkpoint's `config.json`.

One small record instead of a class per family: Llama, Qwen2 and Qwen3 differ in four switches (biases, q/k norm).
Whatever a file asks for that this decoder does not do is refused by name, never ignored: a model that runs with the
wrong attention would still write text, and every proof over it would be worthless.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from refimpl.work import ModelSize

Family = Literal["llama", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


class ConfigError(ValueError):
    """A `config.json` that cannot be used. Takes exactly one argument: the sentence that names file, field, value."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its base and how it is stretched to longer texts (`refimpl/model/rope.py`)."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # stretches the context by this much; all kinds but default
    positions_original: int = 0  # context length before stretching; llama3, yarn
    low_frequency_factor: float = 1.0  # llama3: wavelengths above positions_original / this are stretched in full
    high_frequency_factor: float = 4.0  # llama3: wavelengths below positions_original / this are left alone
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a dimension is left alone
    beta_slow: float = 1.0  # yarn: rotations below which it is stretched in full
    attention_factor: float | None = None  # yarn: scales cos and sin; None: 0.1 ln(factor) + 1
    mscale: float = 0.0  # yarn, both set: attention_factor = m(mscale) / m(mscale_all_dim)
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the border dimensions outwards


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that decides what a decoder computes, apart from its weights."""

    family: Family
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions_max: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tied_head: bool = False  # the output head is the embedding matrix
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    eos_ids: tuple[int, ...] = ()
    name: str = ""  # for people and price lists; no part of what is computed

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "query_heads", "kv_heads", "head_dim", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a positive integer")
        if self.query_heads % self.kv_heads:
            raise ConfigError(f"query_heads is {self.query_heads}, expected a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, expected an even number: RoPE turns pairs")

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for the end-of-text ids) of the folder `path`.

        Raises `ConfigError` with the file, the field, its value and what was expected.
        """
        file = Path(path) / "config.json"
        raw = _read_json(file)
        generation = file.with_name("generation_config.json")
        eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
        try:
            return _parse(raw, eos if eos is not None else raw.get("eos_token_id"), Path(path).resolve().name)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    def size(self, layers: range | None = None, *, bytes_per_weight: float = 2.0) -> ModelSize:
        """What these layers weigh, for `refimpl.work`. A tied matrix that serves both ends counts once."""
        chosen = range(self.layers) if layers is None else layers
        first, last = chosen.start == 0, chosen.stop == self.layers
        return ModelSize(
            name=self.name,
            layers=len(chosen),
            hidden=self.hidden,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate,
            vocabulary=self.vocabulary,
            bytes_per_weight=bytes_per_weight,
            with_embedding=first and not (last and self.tied_head),
            with_head=last,
        )

    def fingerprint(self) -> str:
        """One line that is equal for two configs exactly when they compute the same."""
        fields = dataclasses.asdict(self)
        del fields["name"], fields["eos_ids"]
        return json.dumps(fields, sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """The `config.json` that transformers reads as the same model."""
        architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        fields: dict[str, Any] = {
            "architectures": [architecture[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions_max,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_head,
            "eos_token_id": list(self.eos_ids) if len(self.eos_ids) != 1 else self.eos_ids[0],
            "rope_parameters": _rope_json(self.rope),
        }
        if self.family != "qwen2":
            fields["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            fields["mlp_bias"] = self.mlp_bias
        return fields


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: expected the folder of a checkpoint (make model)") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds a {type(raw).__name__}, expected an object")
    return raw


def _parse(raw: dict[str, Any], eos: Any, name: str) -> ModelConfig:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"model_type is {family!r}, expected one of {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act is {raw['hidden_act']!r}, expected 'silu'")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise ConfigError("use_sliding_window is true, expected false: this decoder attends to the whole text")
    if raw.get("quantization_config"):
        raise ConfigError("quantization_config is set, expected plain weights: dequantise the checkpoint first")
    heads = _integer(raw, "num_attention_heads")
    hidden = _integer(raw, "hidden_size")
    positions_max = _integer(raw, "max_position_embeddings", 2048)
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        layers=_integer(raw, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_integer(raw, "intermediate_size"),
        query_heads=heads,
        kv_heads=_integer(raw, "num_key_value_heads", heads),
        head_dim=_integer(raw, "head_dim", hidden // max(heads, 1)),
        vocabulary=_integer(raw, "vocab_size"),
        positions_max=positions_max,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_parse_rope(raw, positions_max),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias,
        output_bias=False if family == "qwen2" else bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) if family == "llama" else False,
        qk_norm=family == "qwen3",
        eos_ids=_parse_eos(eos),
        name=name,
    )


def _parse_eos(eos: Any) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"eos_token_id is {eos!r}, expected a token id or a list of them")
    return tuple(ids)


def _parse_rope(raw: dict[str, Any], positions_max: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope_type is {kind!r}, expected one of {', '.join(ROPE_KINDS)}")
    if given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("partial_rotary_factor is set, expected 1.0: all of a head is turned")
    theta = _number(given if "rope_theta" in given else raw, "rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    positions_original = _integer(given, "original_max_position_embeddings", positions_max)
    if kind == "llama3":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=_number(given, "factor"),
            positions_original=positions_original,
            low_frequency_factor=_number(given, "low_freq_factor"),
            high_frequency_factor=_number(given, "high_freq_factor"),
        )
    if kind == "yarn":
        factor = positions_max / positions_original if given.get("factor") is None else _number(given, "factor")
        stated = given.get("attention_factor")
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=factor,
            positions_original=positions_original,
            beta_fast=_number(given, "beta_fast", 32.0),
            beta_slow=_number(given, "beta_slow", 1.0),
            attention_factor=None if stated is None else _number(given, "attention_factor"),
            mscale=_number(given, "mscale", 0.0),
            mscale_all_dim=_number(given, "mscale_all_dim", 0.0),
            truncate=bool(given.get("truncate", True)),
        )
    return RopeConfig(kind=kind, theta=theta, factor=_number(given, "factor"))


def _rope_json(rope: RopeConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        fields["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.positions_original
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_frequency_factor, "high_freq_factor": rope.high_frequency_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        fields |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim} if rope.mscale else {}
        fields |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    return fields


def _integer(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, expected a positive integer")
    return value


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ConfigError(f"{name} is {value!r}, expected a number of at least 0")
    return float(value)
