"""The torch engine: causal language models of transformers over a paged pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
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
from pd_grpc.engine.batch_rows import filled
from pd_grpc.engine.constraint import constraint_of
from pd_grpc.engine.device import CPU, Streams, find_device, free_bytes, placed, streams_of
from pd_grpc.engine.device_memory import DeviceKvMemory
from pd_grpc.engine.fingerprint import model_fingerprint, positions_fingerprint
from pd_grpc.engine.forward_pass import Passing
from pd_grpc.engine.hf_tokenizer import HfTokenizer, read_tokenizer
from pd_grpc.engine.layer_events import LayerEvents
from pd_grpc.engine.memory import HostKvMemory
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_guard import check_attention, check_pass, kv_shape, refuse_unsupported
from pd_grpc.engine.model_source import ModelSource
from pd_grpc.engine.paged_attention import ATTENTION_NAME, PagedKv, Run, Step
from pd_grpc.engine.pool_size import describe_pool, pool_blocks
from pd_grpc.engine.sampler import SAMPLER_FEATURES, Logits, Mask, NotFinite, NotSampleable, sample
from pd_grpc.engine.spent_pages import trim_heap
from pd_grpc.engine.weight_cache import weight_cache
from pd_grpc.engine.weights import load_weights, move_weights, read_config, reading
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind


class TorchEngine(Engine):
    """A transformers model and its pool.

    A forward pass is one packed sequence `(1, rows)`: the rows of all chunks, then one row for each
    slot. Nothing of a request is kept between two steps but its KV.
    """

    features = SAMPLER_FEATURES

    def __init__(
        self,
        name: str,
        model: Any,
        passing: Passing,
        tokenizer: HfTokenizer,
        layout: KvLayout,
        num_blocks: int,
        max_model_len: int,
        shares_pool: bool = False,
        streams: Streams | None = None,
    ) -> None:
        """`passing` is that of `model`, which fits `layout`; the pool is on the model's device.
        With `shares_pool` it lies in memory that others of this host may map, if that is the CPU.
        `streams` stand in for the device's own; the pool is then reached by them, also on the
        CPU."""
        self.name = name
        self.layout = layout
        self.vocab_size = int(model.config.vocab_size)
        self.max_model_len = max_model_len
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._model = model
        self._passing = passing
        self._tokenizer = tokenizer
        self.grammars = constraint_of(tokenizer, self.vocab_size, self.eos_token_ids)
        if self.grammars is not None:
            self.features = SAMPLER_FEATURES | {"structured_output"}
        self._device: torch.device = model.device
        on_host = self._device.type == "cpu" and streams is None
        self._streams = streams or streams_of(self._device)
        shares_pool = shares_pool and on_host
        self._kv = PagedKv(layout, num_blocks, model.dtype, shares_pool, self._device)
        self._staged: DeviceKvMemory | None = None
        if on_host:
            shared_fd = None if self._kv.shared is None else self._kv.shared.fd
            self.memory = HostKvMemory(self._kv.buffer(), layout, shared_fd)
        else:
            self.memory = self._staged = DeviceKvMemory(self._kv.blocks, layout, self._streams)

    def prefill(
        self, batch: Sequence[PrefillChunk], on_layer: Callable[[int, int], None]
    ) -> list[Sampled | None]:
        return self.step(batch, (), on_layer)[0]

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Sampled]:
        return self.step((), batch, lambda group, layer: None)[1]

    def step(
        self,
        chunks: Sequence[PrefillChunk],
        slots: Sequence[DecodeSlot],
        on_layer: Callable[[int, int], None],
    ) -> tuple[list[Sampled | None], list[Sampled]]:
        runs = [Run(chunk.start, len(chunk.token_ids), chunk.block_table) for chunk in chunks]
        runs += [Run(slot.position, 1, slot.block_table) for slot in slots]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        token_ids += [slot.token_id for slot in slots]
        specs = [chunk.sample for chunk in chunks] + [slot.sample for slot in slots]
        last_rows = accumulate((run.rows for run in runs), initial=-1)
        next(last_rows)
        wanted = [row for row, spec in zip(last_rows, specs, strict=True) if spec is not None]
        logits = iter(self._forward(runs, token_ids, wanted, lambda layer: on_layer(0, layer)))
        prefilled = [
            None if chunk.sample is None else self._sample(next(logits), chunk.sample)
            for chunk in chunks
        ]
        return prefilled, [self._sample(next(logits), slot.sample) for slot in slots]

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
        """One pass; the logits of the `wanted` rows, float32, `(len(wanted), vocab)`, on the CPU.
        They come there by one copy, that of the step's end."""
        if not runs:
            return torch.empty(0, self.vocab_size)
        layers = LayerEvents(self._streams.compute, on_layer)
        try:
            self._check_tokens(token_ids)
            with self._streams.compute.use():
                logits = self._ask(runs, token_ids, wanted, layers)
            layers.finish()
        except (RuntimeError, IndexError, ValueError) as error:
            if layers.raised is error:
                raise
            raise EngineFault(f"the forward pass failed: {error}") from error
        finally:
            # Also a step that failed: its blocks are free as soon as this returns.
            self._streams.compute.record().wait()
        return logits

    def _ask(
        self,
        runs: Sequence[Run],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        on_layer: Callable[[int], None],
    ) -> torch.Tensor:
        """Ask the device for a pass; the logits are there when its stream has got so far."""
        if self._staged is not None and self._staged.written is not None:
            self._streams.compute.wait(self._staged.written)
        step = Step(self._kv, runs, on_layer)
        padding = filled(step.rows, self._passing.rows_group) - step.rows
        input_ids, keep = placed(
            self._device,
            torch.tensor([*token_ids, *[0] * padding]),
            self._rows_to_keep(wanted),
        )
        positions = torch.nn.functional.pad(step.positions, (0, padding))
        logits = self._passing.forward(input_ids, positions, step, keep)[: len(wanted)].float()
        return logits.to(CPU, non_blocking=True)

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        # As with block tables: what the CPU refuses would end a device.
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise IndexError(f"a token id is outside the vocabulary of {self.vocab_size}")

    def _rows_to_keep(self, wanted: Sequence[int]) -> torch.Tensor:
        # The product with the vocabulary is one more whose bits depend on few rows or many.
        padding = filled(len(wanted), self._passing.wanted_group) - len(wanted)
        return torch.tensor([*wanted, *[0] * padding], dtype=torch.long)

    def _sample(self, logits: torch.Tensor, spec: SampleSpec) -> Sampled:
        row = logits.numpy()
        if spec.sampling.structured_output is None:
            return self._chosen(row, spec, None)
        if self.grammars is None:
            return Sampled(-1, fault="this model's answers cannot follow a grammar")
        return self.grammars.choose(spec, lambda mask: self._chosen(row, spec, mask))

    def _chosen(self, row: Logits, spec: SampleSpec, mask: Mask | None) -> Sampled:
        try:
            return sample(row, spec, self.eos_token_ids, mask)
        except NotSampleable as error:
            fault = f"sampling failed: {error}"
            return Sampled(-1, fault=fault, not_finite=isinstance(error, NotFinite))


def load_torch_engine(
    config: EngineConfig, source: ModelSource, progress: Callable[[str], None]
) -> TorchEngine:
    """Load `source` as `config` describes. ModelError names the field that is wrong."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    with torch.inference_mode():
        with reading(source):
            model_config = read_config(source)
            max_model_len = _model_len(source, model_config, config.max_model_len)
            refuse_unsupported(source.name, model_config, max_model_len)
            tokenizer = read_tokenizer(source)
        progress("loading weights")
        model = load_weights(
            source,
            model_config,
            dtype,
            ATTENTION_NAME,
            weight_cache(config.weight_cache, config.weight_cache_gib),
            progress,
        )
        # What was read and parsed is done with, and weights are about to be packed.
        trim_heap()
        move_weights(source, model, device)
        progress("checking the attention")
        layout = _layout(source, model, config, max_model_len)
        reference = check_attention(source.name, model, layout, max_model_len)
        trim_heap()
        passing = Passing.quickest(model, reference.agrees)
        trim_heap()
        check_pass(source.name, passing.forward, reference)
    del reference
    trim_heap()
    blocks = pool_blocks(config, layout.block_bytes, lambda: free_bytes(device))
    pool = describe_pool(blocks, layout.block_bytes, config.block_size, max_model_len)
    progress(f"making {pool}")
    return TorchEngine(
        source.name,
        model,
        passing,
        tokenizer,
        layout,
        blocks,
        max_model_len,
        config.shares_pool,
    )


def _layout(source: ModelSource, model: Any, config: EngineConfig, max_model_len: int) -> KvLayout:
    shape = kv_shape(source.name, model, max_model_len)
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
    limit = getattr(model_config, "max_position_embeddings", None)
    if limit is None:
        text = "it does not say how long a sequence may be (max_position_embeddings)"
        raise ModelError("model", f"{source.name} is not supported: {text}")
    limit = int(limit)
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
