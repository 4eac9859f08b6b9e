"""GGUF files of tiny models: the same logits as from safetensors, with the cache and without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen2Config

from pd_grpc.engine.gguf_weights import GgufWeights
from pd_grpc.engine.load import ModelError
from pd_grpc.engine.model_source import find_model
from pd_grpc.engine.weight_cache import WeightCache
from pd_grpc.engine.weights import load_weights, read_config, reading
from tests.engine.torch_models import SIZES, load_tiny, save_model

Q8 = gguf.GGMLQuantizationType.Q8_0
F16 = gguf.GGMLQuantizationType.F16
F32 = gguf.GGMLQuantizationType.F32
# Rows of whole quantization blocks, of 32.
WIDE = {**SIZES, "hidden_size": 96, "intermediate_size": 192}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, ending = rest.rpartition(".")
    return f"blk.{layer}.{LAYER_NAMES[part]}.{ending}"


def permuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """A Llama's queries and keys as llama.cpp wants them: pairs side by side, not halves."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    folder: Path,
    config: Any,
    kind: gguf.GGMLQuantizationType = F32,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """The model of `folder` as a GGUF file, its matrices in `kind`."""
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if arch == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["t", "0", *(f"t{i}" for i in range(config.vocab_size - 2))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    more(writer)
    for name, tensor in load_file(folder / "model.safetensors").items():
        weights = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weights = permuted(weights, heads)
        stored = kind if weights.ndim == 2 else F32
        data = gguf.quantize(np.ascontiguousarray(weights), stored)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**WIDE),
    "llama, tied": lambda: LlamaConfig(**WIDE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**WIDE),
}


def model_of(path: Path, cache: WeightCache | None, stages: list[str] | None = None) -> Any:
    source = find_model(str(path))
    with reading(source), torch.inference_mode():
        tell = (stages if stages is not None else []).append
        return load_weights(source, read_config(source), torch.float32, "eager", cache, tell)


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.arange(3, 60)[None], use_cache=False).logits
    return out


@pytest.mark.parametrize("kind", [F32, F16, Q8], ids=["f32", "f16", "q8_0"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_are_those_of_the_same_weights_in_safetensors(
    tmp_path: Path, name: str, kind: gguf.GGMLQuantizationType
) -> None:
    config = CONFIGS[name]()
    folder = save_model(tmp_path / "folder", config)
    path = write_gguf(tmp_path / "tiny.gguf", folder, config, kind)
    expected = model_of(folder, None)
    for parameter in expected.parameters():
        if parameter.ndim == 2:
            packed = gguf.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.dequantize(packed, kind).copy())
    cache = WeightCache(tmp_path / "cache", 1 << 30)

    for model in (model_of(path, None), model_of(path, cache), model_of(path, cache)):
        assert torch.equal(logits_of(model), logits_of(expected))


def test_it_is_unpacked_once_and_anew_when_the_file_or_the_entry_changes(tmp_path: Path) -> None:
    config = LlamaConfig(**WIDE)
    folder = save_model(tmp_path / "folder", config)
    path = write_gguf(tmp_path / "tiny.gguf", folder, config)
    cache = WeightCache(tmp_path / "cache", 1 << 30)
    stages: list[str] = []
    first = logits_of(model_of(path, cache, stages))
    assert len(stages) == 1
    model_of(path, cache, stages)
    assert len(stages) == 1

    (entry,) = (tmp_path / "cache").iterdir()
    damaged = bytearray(entry.read_bytes())
    damaged[-100] ^= 1
    entry.write_bytes(damaged)
    assert torch.equal(logits_of(model_of(path, cache, stages)), first)
    assert len(stages) == 2

    times = path.stat()
    write_gguf(path, save_model(tmp_path / "other", config, seed=1), config)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    assert not torch.equal(logits_of(model_of(path, cache, stages)), first)
    assert len(stages) == 3


def test_it_is_read_whole_where_the_system_gives_little_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux does with a tensor of 2 GiB."""
    config = LlamaConfig(**WIDE)
    path = write_gguf(tmp_path / "tiny.gguf", save_model(tmp_path / "folder", config), config)
    right = logits_of(model_of(path, None))
    read = os.preadv

    def little(fd: int, into: list[memoryview], at: int) -> int:
        return read(fd, [each[:1000] for each in into], at)

    monkeypatch.setattr(os, "preadv", little)
    assert torch.equal(logits_of(model_of(path, None)), right)


def test_without_a_place_for_it_the_model_loads_and_says_so_once(tmp_path: Path) -> None:
    config = LlamaConfig(**WIDE)
    path = write_gguf(tmp_path / "tiny.gguf", save_model(tmp_path / "folder", config), config)
    (tmp_path / "file").write_text("no folder")
    stages: list[str] = []

    model = model_of(path, WeightCache(tmp_path / "file", 1 << 30), stages)

    assert torch.equal(logits_of(model), logits_of(model_of(path, None)))
    assert [stage.startswith("weights are not cached: ") for stage in stages] == [True, False]


class CrowdedCache(WeightCache):
    """One whose entry another process removes as soon as it is found."""

    def find(self, key: str) -> Path | None:
        found = super().find(key)
        if found is not None:
            found.unlink()
        return found


def test_an_entry_that_is_removed_before_it_is_read_is_converted_again(tmp_path: Path) -> None:
    config = LlamaConfig(**WIDE)
    path = write_gguf(tmp_path / "tiny.gguf", save_model(tmp_path / "folder", config), config)
    cache = CrowdedCache(tmp_path / "cache", 1 << 30)
    first = model_of(path, cache)
    stages: list[str] = []

    again = model_of(path, cache, stages)

    assert torch.equal(logits_of(again), logits_of(first))
    assert stages == ["weights are cached no longer", "unpacking weights"]


def rope_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))


REFUSED: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "factors of rope": (rope_factors, "1 tensors that transformers does not read"),
    "scaling of rope": (
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        "says llama.rope.scaling.type = yarn",
    ),
    "a window": (
        lambda writer: writer.add_sliding_window(64),
        "says llama.attention.sliding_window = 64",
    ),
    "other heads": (
        lambda writer: writer.add_key_length(64),
        "says llama.attention.key_length = 64",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_transformers_would_leave_out_is_refused_by_name(tmp_path: Path, what: str) -> None:
    more, says = REFUSED[what]
    config = LlamaConfig(**WIDE)
    folder = save_model(tmp_path / "folder", config)
    path = write_gguf(tmp_path / "tiny.gguf", folder, config, more=more)

    with pytest.raises(ModelError) as caught:
        model_of(path, WeightCache(tmp_path / "cache", 1 << 30))

    assert caught.value.field == "model" and says in caught.value.message
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_engine_runs_on_it(tmp_path: Path) -> None:
    config = LlamaConfig(**WIDE)
    path = write_gguf(tmp_path / "tiny.gguf", save_model(tmp_path / "folder", config), config)

    engine = load_tiny(path, weight_cache=str(tmp_path / "cache"))

    assert engine.name == "tiny"
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.model
@pytest.mark.usefixtures("packaged_model")
def test_the_packaged_weights_are_those_that_transformers_converts() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = find_model("smollm2")
    path = Path(source.location) / str(source.gguf)
    with reading(source):
        config = read_config(source)
        with torch.device("meta"):
            skeleton: Any = AutoModelForCausalLM.from_config(config)
        theirs = load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.bfloat16
        )["tensors"]
        for name, tensor in GgufWeights("smollm2", path, config).convert(torch.bfloat16):
            assert torch.equal(tensor, theirs.pop(name))
    assert not theirs
