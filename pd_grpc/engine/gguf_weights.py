"""The weights of a GGUF file as tensors of a transformers model, one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers.modeling_gguf_pytorch_utils as transformers_gguf
from transformers import AutoModelForCausalLM

from pd_grpc.engine.model_error import ModelError

CONVERTER = f"1, transformers {version('transformers')}, gguf {version('gguf')}"
"""What the numbers of a converted tensor depend on beside the file and the dtype."""

_ROWS_AT_ONCE = 1 << 20
# What a file says that changes nothing here: it describes the file, or is read elsewhere.
_DESCRIPTIONS = ("GGUF.", "general.", "tokenizer.", "quantize.")
# Of the keys that transformers does not read, those whose value does not matter, or this one only.
_HARMLESS: dict[str, object] = {
    "vocab_size": None,
    "rope.dimension_count": None,
    "rope.scaling.type": "none",
    "rope.scaling.finetuned": None,
    "attention.causal": True,
    "expert_feed_forward_length": None,
    "expert_count": 0,
    "expert_used_count": 0,
}
_HEAD_SIZES = ("attention.key_length", "attention.value_length")


class GgufWeights:
    """The tensors of a file for a model of `config`, as transformers converts them.

    ModelError when the file has a tensor or says a thing about its model that transformers would
    leave out in silence, such as factors of RoPE, biases or a window.
    """

    def __init__(self, name: str, path: Path, config: Any) -> None:
        self._path = path
        self._reader = gguf.GGUFReader(str(path))
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        architecture = str(self._reader.fields["general.architecture"].contents())
        kind: Any = transformers_gguf.TENSOR_PROCESSORS.get(
            architecture, transformers_gguf.TensorProcessor
        )
        self._processor = kind(config=config.to_dict())
        self._names = transformers_gguf.get_gguf_hf_weights_map(skeleton, self._processor)
        self._refuse_unread(name, architecture, config)
        self.header_bytes = 4096 + sum(len(key) + 160 for key in skeleton.state_dict())
        """Room for the names and shapes of all tensors in a safetensors file."""

    def convert(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of the model and its name, in `dtype`, the largest first: while it is
        unpacked, in float32, there is nothing else yet."""
        merged: dict[str, torch.Tensor] = {}
        with self._path.open("rb") as file:
            for tensor in sorted(self._reader.tensors, key=lambda one: -one.n_elements):
                found = self._processor.process(
                    weights=_unpacked(file.fileno(), tensor),
                    name=tensor.name,
                    tensor_key_mapping=self._names,
                    parsed_parameters={"tensors": merged},
                )
                if found.name in self._names:
                    weights = torch.from_numpy(np.ascontiguousarray(found.weights))
                    yield self._names[found.name], weights.to(dtype)
        for name, weights in merged.items():
            yield name, weights.to(dtype)

    def _refuse_unread(self, name: str, architecture: str, config: Any) -> None:
        unread = [one.name for one in self._reader.tensors if not self._has_place(one.name)]
        if unread:
            raise ModelError(
                "model",
                f"{name} has {len(unread)} tensors that transformers does not read from a GGUF "
                f"file, the first is {unread[0]}; load the model's safetensors instead",
            )
        known: Any = transformers_gguf.GGUF_TO_TRANSFORMERS_MAPPING["config"]
        read = known.get(config.model_type) or known.get(architecture) or {}
        for key, field in self._reader.fields.items():
            if key.startswith(_DESCRIPTIONS):
                continue
            short = key.removeprefix(f"{architecture}.")
            if read.get(short) is not None:
                continue
            value = field.contents()
            if short in _HARMLESS and _HARMLESS[short] in (None, value):
                continue
            if short in _HEAD_SIZES and value == _head_dim(config):
                continue
            raise ModelError(
                "model",
                f"{name} says {key} = {value}, which transformers does not read from a GGUF file; "
                f"load the model's safetensors instead",
            )

    def _has_place(self, name: str) -> bool:
        # Experts merged into one tensor are known without their ending.
        return name in self._names or name.removesuffix(".weight") in self._names


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _unpacked(fd: int, tensor: Any) -> npt.NDArray[np.float32]:
    """A tensor in float32. It is read, not mapped: the pages of a mapping would count as ours until
    the last tensor is done."""
    raw = np.empty(tensor.n_bytes, np.uint8)
    _read(fd, raw.data, tensor.data_offset)
    packed = raw.view(tensor.data.dtype).reshape(tensor.data.shape)
    if packed.ndim < 2:
        return np.array(gguf.dequantize(packed, tensor.tensor_type), np.float32)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    out = np.empty(shape, np.float32)
    rows = max(1, _ROWS_AT_ONCE * len(packed) // max(1, tensor.n_elements))
    for at in range(0, len(packed), rows):
        out[at : at + rows] = gguf.dequantize(packed[at : at + rows], tensor.tensor_type)
    return out


def _read(fd: int, into: memoryview, at: int) -> None:
    """Fill `into` with what a file has from `at` on. Linux gives less than 2 GiB at once. OSError
    when the file ends before."""
    while into:
        size = os.preadv(fd, [into], at)
        if not size:
            raise OSError("the file has been cut off since it was opened")
        into, at = into[size:], at + size
