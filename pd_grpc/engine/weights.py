"""Loading a causal language model with transformers, its weights dense in one dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_source import ModelSource


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


def load_weights(source: ModelSource, config: Any, dtype: torch.dtype, attention: str) -> Any:
    """The model in evaluation mode, every weight present, in `dtype`, on the CPU.

    `attention` is the name of a registered attention function. ModelError when transformers has no
    causal language model for `config`, or weights are missing: transformers itself would fill them
    with random numbers.
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
            tensors = _gguf_tensors(source, config, dtype)
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
    missing = sorted([*info["missing_keys"], *map(str, info["mismatched_keys"])])
    if missing:
        raise ModelError(
            "model",
            f"{source.name} lacks {len(missing)} weights or has them in another shape, "
            f"the first is {missing[0]}",
        )
    return model.eval()


def _gguf_tensors(source: ModelSource, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    # from_pretrained(gguf_file=...) asks for accelerate, though it does not use it here.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    path = Path(source.location) / str(source.gguf)
    loaded = load_gguf_checkpoint(
        str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype
    )
    tensors: dict[str, torch.Tensor] = loaded["tensors"]
    return tensors


def reading(
    source: ModelSource, progress: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """A context in which reading `source` is quick and reports to `progress`."""
    if source.gguf is None:
        return contextlib.nullcontext()
    from pd_grpc.engine.gguf_reading import quick_gguf

    return quick_gguf(progress)
