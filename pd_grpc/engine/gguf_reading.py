"""Reading a GGUF file through transformers in seconds instead of half a minute.

transformers parses the file for the configuration and again for the tokenizer, and asks gguf for
its table of tensor names once per module of the model. Most of the time goes into slicing a hundred
thousand vocabulary strings out of a numpy memmap one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt


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
def quick_gguf() -> Iterator[None]:
    """While it is open, transformers reads each GGUF file and each table of names once.

    The replaced functions return what the originals do. Should a release of transformers look them
    up elsewhere, loading is slow again and still right. Not for two threads at once.
    """
    reader = functools.lru_cache(maxsize=1)(BufferReader)
    names = functools.lru_cache(maxsize=1)(gguf.get_tensor_name_map)
    quick: list[tuple[str, Any]] = [("GGUFReader", reader), ("get_tensor_name_map", names)]
    originals = [(name, getattr(gguf, name)) for name, _ in quick]
    try:
        for name, value in quick:
            setattr(gguf, name, value)
        yield
    finally:
        for name, value in originals:
            setattr(gguf, name, value)
