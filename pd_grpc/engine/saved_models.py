"""Models written to a folder, for loads that are measured: a GGUF file as safetensors, and one of
next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from pd_grpc.engine.hf_tokenizer import read_tokenizer
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_source import find_model
from pd_grpc.engine.weights import load_weights, read_config, reading


def save_safetensors(model: str, dtype: str, folder: Path) -> None:
    """The weights, configuration and tokenizer of a GGUF file as a Hugging Face folder. ModelError
    when `model` is none."""
    source = find_model(model)
    if source.gguf is None:
        raise ModelError("model", f"{model} has no GGUF file to compare safetensors with")
    with reading(source):
        config = read_config(source)
        tokenizer = read_tokenizer(source)
        loaded = load_weights(source, config, getattr(torch, dtype), "eager")
    loaded.save_pretrained(folder)
    tokenizer._tokenizer.save_pretrained(folder)


def save_warm_model(folder: Path) -> None:
    """A Llama of some KiB with a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend: Any = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(letters) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=len(letters),
        eos_token_id=len(letters),
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
