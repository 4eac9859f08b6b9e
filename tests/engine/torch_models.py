"""Tiny random models on disk, and requests run on an engine by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from pd_grpc.engine.base import DecodeSlot, PrefillChunk, Sampled, SampleSpec
from pd_grpc.engine.device import Streams
from pd_grpc.engine.load import load_engine
from pd_grpc.engine.penalties import tally
from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.sampling import Sampling

VOCAB = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied-yarn": lambda: LlamaConfig(
        **SIZES,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
}

NO_LAYER: Callable[[int, int], None] = lambda group, layer: None  # noqa: E731


def save_model(folder: Path, config: Any, seed: int = 0) -> Path:
    """A random model of `config` with a byte tokenizer, as a Hugging Face folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero at birth, so that forgetting one would not show
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and two to begin and to end with."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def load_tiny(folder: Path, **options: Any) -> TorchEngine:
    """In float32 with 64 blocks of 8 tokens, unless told otherwise."""
    defaults = {"dtype": "float32", "num_blocks": 64, "block_size": 8, "chunk_tokens": 32}
    engine = load_engine(EngineConfig(model=str(folder), **{**defaults, **options}))
    assert isinstance(engine, TorchEngine)
    return engine


def load_for(config: EngineConfig, folder: Path) -> TorchEngine:
    """What a server of this configuration would load from `folder`."""
    engine = load_engine(config.model_copy(update={"model": str(folder)}))
    assert isinstance(engine, TorchEngine)
    return engine


def beside(
    engine: TorchEngine,
    num_blocks: int,
    shares_pool: bool = False,
    streams: Streams | None = None,
) -> TorchEngine:
    """Another engine over the same weights, with a pool of its own, reached by `streams`."""
    return TorchEngine(
        engine.name,
        engine._model,
        engine._passing,
        engine._tokenizer,
        engine.layout,
        num_blocks,
        engine.max_model_len,
        shares_pool,
        streams,
    )


def another_pool(engine: TorchEngine) -> Callable[[EngineConfig], TorchEngine]:
    """Makes engines with the weights of `engine` and a pool of their own."""
    return lambda config: beside(engine, config.num_blocks, config.shares_pool)


def eager_tokens(
    folder: Path, prompt: Sequence[int], count: int, processors: Any = None
) -> list[int]:
    """What transformers' own `generate` with eager attention says, greedily, past any EOS, with
    these LogitsProcessors."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            logits_processor=processors,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


class Request:
    """One request on an engine: its prompt in chunks, then its tokens one by one."""

    def __init__(
        self, prompt: Sequence[int], block_table: Sequence[int], sampling: Sampling
    ) -> None:
        self.prompt = list(prompt)
        self.table = list(block_table)
        self.sampling = sampling
        self.output: list[Sampled] = []

    @property
    def tokens(self) -> list[int]:
        return [sampled.token_id for sampled in self.output]

    def chunks(self, chunk_tokens: int) -> list[PrefillChunk]:
        starts = range(0, len(self.prompt), chunk_tokens)
        chunks = [
            PrefillChunk(self.prompt[at : at + chunk_tokens], at, self.table) for at in starts
        ]
        last = chunks[-1]
        spec = SampleSpec(self.sampling, len(self.prompt), 0, tally(self.prompt, ()))
        return [*chunks[:-1], PrefillChunk(last.token_ids, last.start, self.table, spec)]

    def slot(self) -> DecodeSlot:
        position = len(self.prompt) + len(self.output) - 1
        so_far = tally(self.prompt, self.tokens)
        spec = SampleSpec(self.sampling, position + 1, len(self.output), so_far)
        return DecodeSlot(self.tokens[-1], position, self.table, spec)


def prefill(engine: TorchEngine, requests: Sequence[Request], chunk_tokens: int = 32) -> None:
    """All prompts, the first chunks together, then the second ones, and so on."""
    waiting = [(request, request.chunks(chunk_tokens)) for request in requests]
    while waiting:
        sampled = engine.prefill([chunks[0] for _, chunks in waiting], NO_LAYER)
        for (request, _), token in zip(waiting, sampled, strict=True):
            if token is not None:
                request.output.append(token)
        waiting = [(request, chunks[1:]) for request, chunks in waiting if chunks[1:]]


def decode(engine: TorchEngine, requests: Sequence[Request]) -> None:
    """All requests together, each until it has its `max_tokens`."""
    while running := [r for r in requests if len(r.output) < r.sampling.max_tokens]:
        sampled = engine.decode([request.slot() for request in running])
        for request, token in zip(running, sampled, strict=True):
            request.output.append(token)
