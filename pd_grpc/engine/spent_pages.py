"""Giving back memory that loading took and needs no more: pages of weights that were copied, and
what was freed."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_MADV_DONTNEED = 4


def give_back(weight: torch.Tensor) -> None:
    """Drop the pages that hold `weight` alone, on the CPU; nobody may read it afterwards.

    Weights of a file are parts of one mapping, which lives for as long as one of them does. Its
    pages would count as this process's until then. Linux; elsewhere nothing is done."""
    if sys.platform != "linux" or weight.device.type != "cpu":
        return
    page = mmap.PAGESIZE
    start = -(-weight.data_ptr() // page) * page
    length = (weight.data_ptr() + weight.nbytes) // page * page - start
    if length > 0:
        # What it answers does not matter: the pages are there, or they are not.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)


def trim_heap() -> None:
    """Give back the pages of what was freed: parsing a tokenizer leaves tens of MiB in pieces that
    malloc keeps, and packed weights do not fit. glibc; elsewhere nothing is done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
