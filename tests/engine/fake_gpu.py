"""A GPU that is not there: tensors that say that they are on it, of which only shapes are computed.

An operation whose tensors are on two devices raises, as it would on a GPU. What is computed is not
looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Within it every tensor is made fake, and a real one may not be used."""
    with FakeTensorMode(allow_non_fake_inputs=False), _PlainIndexing():
        yield


def on_gpu(model: torch.nn.Module) -> torch.nn.Module:
    """`model` in evaluation mode with fake weights on the GPU."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                there = torch.empty_like(weight, device=GPU)
                module._parameters[name] = torch.nn.Parameter(there, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=GPU)
    return model.eval()


class _PlainIndexing(TorchFunctionMode):
    """Indexing by operations: torch's own asks CUDA which device is current, and a build without
    CUDA has no answer. And what of memory there is not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.data_ptr:
            return id(args[0])
        if func is torch.Tensor.__getitem__:
            return _item(*args)
        if func is torch.Tensor.__setitem__:
            tensor, key, value = args
            keys = key if isinstance(key, tuple) else (key,)
            if all(isinstance(index, torch.Tensor) for index in keys):
                return torch.ops.aten.index_put_(tensor, keys, value)
            return torch.ops.aten.copy_(_item(tensor, key), value)
        return func(*args, **(kwargs or {}))


def _item(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(index, torch.Tensor) for index in keys):
        tensors = [None if index == slice(None) else index for index in keys]
        found: torch.Tensor = torch.ops.aten.index(tensor, tensors)
        return found
    dim = 0
    for at, index in enumerate(keys, 1):
        if index is Ellipsis:
            dim = tensor.dim() - sum(later is not None for later in keys[at:])
        elif index is None:
            tensor = torch.ops.aten.unsqueeze(tensor, dim)
            dim += 1
        elif isinstance(index, slice):
            tensor = torch.ops.aten.slice(tensor, dim, index.start, index.stop, index.step or 1)
            dim += 1
        else:
            tensor = torch.ops.aten.select(tensor, dim, index)
    return tensor
