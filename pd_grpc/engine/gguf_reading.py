"""Reading a GGUF file through transformers in seconds instead of half a minute.

transformers parses the file once for the configuration and once for the weights, and asks gguf for
its table of tensor names once per module of the model. Most of the time goes into slicing a hundred
thousand vocabulary strings out of a numpy memmap one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
import transformers.modeling_gguf_pytorch_utils as transformers_gguf

_REPORT_EVERY = 0.25


class BufferReader(gguf.GGUFReader):
    """gguf's own reader, its smallest step over a plain buffer instead of a numpy memmap."""

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        if self.byte_order != "I":
            return super()._get(offset, dtype, count, override_order)
        return np.frombuffer(self.data, dtype, int(count), int(offset))


@contextmanager
def quick_gguf(progress: Callable[[str], None]) -> Iterator[None]:
    """While it is open, transformers reads each GGUF file and each table of names once.

    The replaced functions return what the originals do. Should a release of transformers look them
    up elsewhere, loading is slow again and still right. Not for two threads at once.
    """
    reader = functools.lru_cache(maxsize=1)(BufferReader)
    names = functools.lru_cache(maxsize=1)(gguf.get_tensor_name_map)

    def report(items: Iterable[Any], **_: object) -> Iterator[Any]:
        return _reporting(list(items), progress)

    quick: list[tuple[ModuleType, str, Any]] = [
        (gguf, "GGUFReader", reader),
        (gguf, "get_tensor_name_map", names),
        (transformers_gguf, "tqdm", report),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in quick]
    try:
        for module, name, value in quick:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def _reporting(items: list[Any], progress: Callable[[str], None]) -> Iterator[Any]:
    due = 0.0
    for done, item in enumerate(items):
        if done >= due:
            progress(f"unpacking weights: {done} of {len(items)} tensors")
            due += _REPORT_EVERY * len(items)
        yield item
