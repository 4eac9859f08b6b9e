"""The torch engine: causal language models of transformers over a paged pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pd_grpc.engine.base import (
    DecodeSlot,
    Engine,
    EngineFault,
    PrefillChunk,
    Sampled,
    SampleSpec,
    Tokenizer,
)
from pd_grpc.engine.batch_rows import filled, steady_group
from pd_grpc.engine.fingerprint import model_fingerprint, positions_fingerprint
from pd_grpc.engine.hf_tokenizer import HfTokenizer, read_tokenizer
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_guard import check_attention, kv_shape, refuse_unsupported
from pd_grpc.engine.model_source import ModelSource
from pd_grpc.engine.paged_attention import ATTENTION_NAME, PagedKv, Run, Step
from pd_grpc.engine.pool_size import check_pool
from pd_grpc.engine.sampler import NotSampleable, sample
from pd_grpc.engine.weights import load_weights, read_config, reading
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind


class TorchEngine(Engine):
    """A transformers model and its pool.

    A forward pass is one packed sequence `(1, rows)`: the chunks of a prefill batch, or one row per
    slot of a decode batch. Nothing of a request is kept between two steps but its KV.
    """

    features = frozenset({"logprobs"})

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: HfTokenizer,
        layout: KvLayout,
        num_blocks: int,
        max_model_len: int,
        shares_pool: bool = False,
    ) -> None:
        """`model` was loaded with the attention `pd_paged` and fits `layout`. With `shares_pool`
        the pool lies in memory that others of this host may map."""
        self.name = name
        self.layout = layout
        self.vocab_size = int(model.config.vocab_size)
        self.max_model_len = max_model_len
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._model = model
        self._tokenizer = tokenizer
        self._group = steady_group(model)
        self._kv = PagedKv(layout, num_blocks, model.dtype, shares_pool)
        shared_fd = None if self._kv.shared is None else self._kv.shared.fd
        self.memory = HostKvMemory(self._kv.buffer(), layout, shared_fd)

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        runs = [Run(chunk.start, len(chunk.token_ids), chunk.block_table) for chunk in batch]
        token_ids = [token_id for chunk in batch for token_id in chunk.token_ids]
        last_rows = []
        row = -1
        for chunk in batch:
            row += len(chunk.token_ids)
            if chunk.sample is not None:
                last_rows.append(row)
        logits = iter(self._forward(runs, token_ids, last_rows, lambda layer: on_layer(0, layer)))
        return [
            None if chunk.sample is None else self._sample(next(logits), chunk.sample)
            for chunk in batch
        ]

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        runs = [Run(slot.position, 1, slot.block_table) for slot in batch]
        token_ids = [slot.token_id for slot in batch]
        logits = self._forward(runs, token_ids, range(len(batch)), lambda layer: None)
        return [self._sample(row, slot.sample) for row, slot in zip(logits, batch, strict=True)]

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def close(self) -> None:
        if self._kv.shared is not None:
            self._kv.shared.close()

    def warm_up(self) -> None:
        run = Run(0, min(2, self.layout.block_size), [0])
        self._forward([run], [0] * run.rows, [0], lambda layer: None)
        self._forward([Run(0, 1, [0])], [0], [0], lambda layer: None)

    @torch.inference_mode()
    def _forward(
        self,
        runs: Sequence[Run],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        on_layer: Callable[[int], None],
    ) -> torch.Tensor:
        """One pass; the logits of the `wanted` rows, float32, `(len(wanted), vocab)`."""
        if not runs:
            return torch.empty(0, self.vocab_size)
        callback = _Callback(on_layer)
        try:
            step = Step(self._kv, runs, callback)
            padding = filled(step.rows, self._group) - step.rows
            out = self._model(
                input_ids=torch.tensor([[*token_ids, *[0] * padding]]),
                position_ids=torch.nn.functional.pad(step.positions, (0, padding))[None],
                use_cache=False,
                logits_to_keep=self._rows_to_keep(wanted),
                pd_step=step,
            )
        except (RuntimeError, IndexError, ValueError) as error:
            if callback.raised is error:
                raise
            raise EngineFault(f"the forward pass failed: {error}") from error
        logits: torch.Tensor = out.logits[0, : len(wanted)].float()
        return logits

    def _rows_to_keep(self, wanted: Sequence[int]) -> torch.Tensor:
        # The product with the vocabulary is one more whose bits depend on few rows or many.
        padding = filled(len(wanted), self._group) - len(wanted)
        return torch.tensor([*wanted, *[0] * padding], dtype=torch.long)

    def _sample(self, logits: torch.Tensor, spec: SampleSpec) -> Sampled:
        try:
            return sample(logits.numpy(), spec, self.eos_token_ids)
        except NotSampleable as error:
            raise EngineFault(f"sampling failed: {error}") from error


class _Callback:
    """Remembers what the caller's `on_layer` raised, to tell it from a fault of the model."""

    def __init__(self, on_layer: Callable[[int], None]) -> None:
        self._on_layer = on_layer
        self.raised: Exception | None = None

    def __call__(self, layer: int) -> None:
        try:
            self._on_layer(layer)
        except (RuntimeError, IndexError, ValueError) as error:
            self.raised = error
            raise


def load_torch_engine(
    config: EngineConfig, source: ModelSource, progress: Callable[[str], None]
) -> TorchEngine:
    """Load `source` as `config` describes. ModelError names the field that is wrong."""
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype: torch.dtype = getattr(torch, config.dtype)
    with reading(source, progress), torch.inference_mode():
        model_config = read_config(source)
        refuse_unsupported(source.name, model_config)
        tokenizer = read_tokenizer(source)
        max_model_len = _model_len(source, model_config, config.max_model_len)
        progress("loading weights")
        model = load_weights(source, model_config, dtype, ATTENTION_NAME)
        progress("checking the attention")
        layout = _layout(source, model, config)
        check_attention(source.name, model, layout)
    check_pool(config.num_blocks, layout.block_bytes)
    mib = config.num_blocks * layout.block_bytes / (1 << 20)
    progress(f"making a pool of {config.num_blocks} blocks, {mib:.0f} MiB")
    return TorchEngine(
        source.name,
        model,
        tokenizer,
        layout,
        config.num_blocks,
        max_model_len,
        config.shares_pool,
    )


def _layout(source: ModelSource, model: Any, config: EngineConfig) -> KvLayout:
    shape = kv_shape(source.name, model)
    planes = tuple(
        Plane(kind, config.dtype, shape.heads, shape.head_dim)
        for kind in (PlaneKind.K, PlaneKind.V)
    )
    return KvLayout(
        model=model_fingerprint(model),
        positions=positions_fingerprint(model.config),
        block_size=config.block_size,
        groups=(KvGroup(GroupKind.FULL, shape.layers, planes),),
    )


def _model_len(source: ModelSource, model_config: Any, asked: int) -> int:
    limit = int(model_config.max_position_embeddings)
    if asked > limit:
        raise ModelError("max_model_len", f"{asked} is more than {source.name} can take, {limit}")
    return asked or limit


def _eos_token_ids(model: Any, tokenizer: HfTokenizer) -> frozenset[int]:
    found = set(tokenizer.eos_token_ids)
    generation = getattr(model, "generation_config", None)
    for config in (model.config, generation):
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(found)
