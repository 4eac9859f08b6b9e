"""Families of models: each gives transformers' own logits, or is refused by name."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_guard import refuse_unsupported
from tests.engine.paged_models import (
    BOUND,
    eager_logits,
    greatest_gap,
    guarded,
    paged_logits,
    texts_of,
    tiny_model,
)
from tests.engine.torch_models import SIZES

pytestmark = [pytest.mark.longest, pytest.mark.usefixtures("one_thread")]

PARTS = 8
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
PARTIAL: dict[str, Any] = {"partial_rotary_factor": 0.5}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LOCAL_AND_GLOBAL: dict[str, Any] = {
    "sliding_window_pattern": 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama, grouped query": lambda: LlamaConfig(**SIZES),
    "llama, multi-query": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama, multi-head": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama, biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, wide heads": lambda: LlamaConfig(**SIZES, head_dim=32),
    "llama, rope linear": lambda: LlamaConfig(**SIZES, **rope("linear", factor=4.0)),
    "llama, rope llama3": lambda: LlamaConfig(**SIZES, **rope("llama3", **LLAMA3)),
    "llama, rope yarn": lambda: LlamaConfig(
        **SIZES, **rope("yarn", factor=4.0, original_max_position_embeddings=128)
    ),
    "smollm, a tied llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "smollm3, layers without rope": lambda: SmolLM3Config(
        **SIZES, pad_token_id=0, no_rope_layers=[1, 0, 1]
    ),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2, a window that is off": lambda: Qwen2Config(
        **SIZES, use_sliding_window=False, sliding_window=16
    ),
    "qwen2, a window beyond the end": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=512, max_window_layers=1
    ),
    "qwen3, q and k norms": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3, biases": lambda: Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral, a window beyond the end": lambda: MistralConfig(**SIZES, sliding_window=512),
    "gemma": lambda: GemmaConfig(**{**SIZES, "initializer_range": 0.05}, head_dim=256),
    "gemma, multi-query": lambda: GemmaConfig(
        **{**SIZES, "num_key_value_heads": 1}, head_dim=16, hidden_act="gelu_pytorch_tanh"
    ),
    "gemma3, a window beyond the end": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=512, **LOCAL_AND_GLOBAL
    ),
    "phi, partial rotary": lambda: PhiConfig(**SIZES, **PARTIAL),
    "gpt2, learned positions": lambda: GPT2Config(
        vocab_size=300, n_embd=48, n_layer=2, n_head=4, n_positions=512
    ),
    "opt, positions that begin at 2": lambda: OPTConfig(
        **SIZES, ffn_dim=96, word_embed_proj_dim=48, pad_token_id=1
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_are_those_of_eager_attention(family: str) -> None:
    model = tiny_model(FAMILIES[family]())
    layout = guarded(model)
    texts = texts_of(model, [190, 100, 7, 1])

    ours = paged_logits(model, layout, texts)

    assert greatest_gap(ours, eager_logits(model, texts)) < BOUND


def sinks_alone() -> Any:
    sizes = {**SIZES, "num_local_experts": 4}
    return GptOssConfig(**sizes, head_dim=8, sliding_window=512)


def other(kind: str, **more: Any) -> Callable[[], Any]:
    return lambda: AutoConfig.for_model(kind, **{**SIZES, **more})


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mistral, a window": (
        lambda: MistralConfig(**SIZES, sliding_window=511),
        "sliding window of 511 tokens, fewer than max_model_len (512); with a max_model_len of 511",
    ),
    "qwen2, a window": (
        lambda: Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=1
        ),
        "sliding window of 64",
    ),
    "gemma3, a window": (
        lambda: Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=64),
        "sliding window of 64",
    ),
    "gemma2, a soft cap": (lambda: Gemma2Config(**SIZES, head_dim=8), "softcap"),
    "gpt-oss, sinks": (sinks_alone, "s_aux"),
    "llama4, chunks": (
        lambda: Llama4TextConfig(**SIZES, head_dim=8, attention_chunk_size=512),
        "layers of kind chunked_attention",
    ),
    "llama4, scales that act late": (
        lambda: Llama4TextConfig(**SIZES, head_dim=8, layer_types=["full_attention"] * 3),
        "attn_temperature_tuning",
    ),
    "rope dynamic": (lambda: LlamaConfig(**SIZES, **rope("dynamic", factor=2.0)), "dynamic"),
    "rope longrope": (
        lambda: LlamaConfig(
            **SIZES, **rope("longrope", original_max_position_embeddings=64, **LONG)
        ),
        "rope_type longrope",
    ),
    "rope of one kind of layer": (
        lambda: Gemma3TextConfig(
            **SIZES,
            head_dim=16,
            sliding_window=512,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
        ),
        "rope_type dynamic",
    ),
    "bloom, ALiBi": (
        other("bloom", n_layer=2, n_head=6),
        "does not use transformers' attention interface",
    ),
    "falcon": (other("falcon"), "does not use transformers' attention interface"),
    "deepseek, latent KV": (other("deepseek_v2", n_routed_experts=4), "differ in size"),
    "diffllama, heads subtracted": (other("diffllama"), "away from its own"),
    "doge, masks of its own": (other("doge"), "attention_mask"),
    "mamba": (other("mamba"), "linear_attention"),
    "qwen3-next, hybrid": (other("qwen3_next"), "linear_attention"),
    "lfm2, convolutions": (
        other("lfm2", layer_types=["conv", "full_attention", "conv"]),
        "layers of kind conv",
    ),
    "bart, encoder and decoder": (other("bart"), "it is not decoder-only"),
    "bert, looks ahead": (other("bert"), "not causal"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_model_with_another_attention_is_refused_by_name(kind: str) -> None:
    make, says = REFUSED[kind]
    config = make()

    with pytest.raises(ModelError) as caught:
        refuse_unsupported("tiny", config, 512)
        guarded(tiny_model(config))

    assert caught.value.field == "model" and says in caught.value.message


def test_a_window_is_seen_where_the_configuration_is_silent_on_it() -> None:
    """Layers said to be full, of a model that puts its window on all of them."""
    config = MistralConfig(**SIZES, sliding_window=64)
    model = tiny_model(config)
    config.layer_types = ["full_attention"] * 3

    with pytest.raises(ModelError, match=r"position \d+ does not see the one at 0|window of 64"):
        guarded(model)
    assert guarded(model, 64).groups[0].layers == 3


def test_a_prefix_that_sees_all_of_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of PaliGemma, for a model that is otherwise a Llama."""
    modeling: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    causal = modeling.create_causal_mask

    def prefix(**asked: Any) -> Any:
        return causal(**asked, or_mask_function=lambda b, h, q, k: (q < 5) & (k < 5))

    monkeypatch.setattr(modeling, "create_causal_mask", prefix)

    with pytest.raises(ModelError, match="position 0 sees the one at 1"):
        guarded(tiny_model(LlamaConfig(**SIZES)))


# Names by which the families say the same sizes, and what makes the others as small.
EVERY_NAME: dict[str, Any] = {
    **{**SIZES, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
    **{"n_embd": 48, "d_model": 48, "n_layer": 2, "n_layers": 2, "num_layers": 2},
    **{"decoder_layers": 2, "n_head": 6, "n_heads": 6, "num_heads": 6},
    **{"decoder_attention_heads": 6, "ffn_dim": 96, "decoder_ffn_dim": 96, "n_positions": 512},
    **{"max_seq_len": 512, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
}


def smallest(kind: str) -> Any:
    """A tiny configuration of a type of transformers; None where these sizes make none."""
    for left_out in ((), ("head_dim",)):
        sizes = {name: size for name, size in EVERY_NAME.items() if name not in left_out}
        # What is wrong with sizes is said by a type in whatever way its authors chose.
        with contextlib.suppress(Exception):
            return AutoConfig.for_model(kind, **sizes)
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_every_causal_model_of_transformers_is_right_or_refused(part: int) -> None:
    right: list[str] = []
    wrong: list[str] = []
    not_made: list[str] = []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[part::PARTS]:
        config = smallest(kind)
        if config is None:
            not_made.append(kind)
            continue
        try:
            refuse_unsupported("tiny", config, config.max_position_embeddings)
            model = tiny_model(config)
        except (ModelError, AttributeError):
            continue
        except (TypeError, KeyError, ValueError, AssertionError):
            not_made.append(kind)
            continue
        try:
            layout = guarded(model)
        except ModelError:
            continue
        texts = texts_of(model, [120, 40])
        gap = greatest_gap(paged_logits(model, layout, texts), eager_logits(model, texts))
        (right if gap < BOUND else wrong).append(kind)

    assert not wrong
    assert len(right) > 3 and len(not_made) < 8
