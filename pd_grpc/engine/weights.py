"""Loading a causal language model with transformers, its weights dense in one dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pd_grpc.engine.device import free_bytes
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_source import ModelSource
from pd_grpc.engine.weight_cache import NotCached, WeightCache, cache_key, file_digest


def read_config(source: ModelSource) -> Any:
    """The model's configuration; ModelError when there is none that transformers knows."""
    try:
        if source.gguf is not None:
            return AutoConfig.from_pretrained(
                source.location, gguf_file=source.gguf, local_files_only=True
            )
        return AutoConfig.from_pretrained(source.location, local_files_only=source.local)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError("model", f"{source.name} has no usable configuration: {error}") from error


def load_weights(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    attention: str,
    cache: WeightCache | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Any:
    """The model in evaluation mode, every weight present, in `dtype`, on the CPU.

    `attention` is the name of a registered attention function. ModelError when transformers has no
    causal language model for `config`, when weights are missing, which transformers itself would
    fill with random numbers, and when there are others that it would leave out. Weights of a GGUF
    file are converted, and kept in `cache` for the next time.
    """
    transformers_logging.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": attention,
        "output_loading_info": True,
        "local_files_only": source.local,
        # Those found are refused below, by name.
        "ignore_mismatched_sizes": True,
    }
    try:
        if source.gguf is not None:
            tensors = _gguf_tensors(source, config, dtype, cache, progress)
            model, info = auto._model_mapping[type(config)].from_pretrained(
                None, state_dict=tensors, **options
            )
        else:
            model, info = auto.from_pretrained(source.location, use_safetensors=True, **options)
    except KeyError as error:
        # What transformers says when a model cannot take the attention it was told.
        reason = "it does not use transformers' attention interface"
        if error.args != (attention,):
            reason = f"cannot be loaded: {error}"
        raise ModelError("model", f"{source.name} is not supported: {reason}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError("model", f"{source.name} cannot be loaded: {error}") from error
    unused = sorted(info["unexpected_keys"])
    if unused:
        raise ModelError(
            "model",
            f"{source.name} has {len(unused)} weights that its configuration has no place for, "
            f"the first is {unused[0]}",
        )
    missing = sorted([*info["missing_keys"], *map(str, info["mismatched_keys"])])
    if missing:
        raise ModelError(
            "model",
            f"{source.name} lacks {len(missing)} weights or has them in another shape, "
            f"the first is {missing[0]}",
        )
    return model.eval()


def _gguf_tensors(
    source: ModelSource,
    config: Any,
    dtype: torch.dtype,
    cache: WeightCache | None,
    progress: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    # from_pretrained(gguf_file=...) asks for accelerate, though it does not use it here.
    from pd_grpc.engine.gguf_weights import CONVERTER, GgufWeights

    path = Path(source.location) / str(source.gguf)

    def opened() -> GgufWeights:
        with reading(source):
            return GgufWeights(source.name, path, config)

    if cache is not None:
        try:
            key = cache_key(file_digest(path), str(dtype), CONVERTER)
            kept = cache.find(key)
            if kept is None:
                weights = opened()
                progress("unpacking weights, for the cache too")
                kept = cache.store(key, weights.header_bytes, weights.convert(dtype))
            return load_file(kept)
        except NotCached as why:
            progress(f"weights are not cached: {why}")
        except FileNotFoundError:
            # Another process made room for an entry of its own.
            progress("weights are cached no longer")
    progress("unpacking weights")
    return dict(opened().convert(dtype))


def move_weights(source: ModelSource, model: Any, device: torch.device) -> None:
    """Have the weights on `device`, and on the CPU no longer. ModelError naming model when it has
    no room for them."""
    if device.type == "cpu":
        return
    needed = sum(weight.nbytes for weight in [*model.parameters(), *model.buffers()])
    free = free_bytes(device)
    try:
        if needed > free:
            raise torch.OutOfMemoryError
        model.to(device)
    except torch.OutOfMemoryError as error:
        text = f"its weights take {needed >> 20} MiB; {free >> 20} MiB are free on {device}"
        raise ModelError("model", f"{source.name}: {text}") from error


def weights_bytes(model: Any) -> int:
    """Of all weights of a model's configuration, in its dtype; also when `model` itself has given
    them to a pass of ours."""
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    return int(sum(weight.nbytes for weight in skeleton.parameters()))


def reading(source: ModelSource) -> contextlib.AbstractContextManager[None]:
    """A context in which reading `source` is quick."""
    if source.gguf is None:
        return contextlib.nullcontext()
    from pd_grpc.engine.gguf_reading import quick_gguf

    return quick_gguf()
