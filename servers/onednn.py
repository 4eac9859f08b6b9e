"""How many of the products that it has compiled oneDNN keeps."""

from __future__ import annotations

from collections.abc import MutableMapping

CAPACITIES = {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""Entries of torch's cache of compiled products and of oneDNN's own; the libraries keep 1,024 in
each. 200 numbers of rows through the four products of a layer of SmolLM2 left 35 MiB in place of
511 in bfloat16, and 54 in place of 627 in float32.

Torch's took 23 to 44% of the memory, with as many entries as oneDNN's, and saved no time. Layers
share what is compiled, and 32 of oneDNN's keep some three numbers of rows. One that is not kept
costs its step 1.0 to 1.3 ms of a core's time, where a token takes 27 ms or more."""

_TOLD = (*CAPACITIES, "DNNL_PRIMITIVE_CACHE_CAPACITY")


def bound_primitives(environ: MutableMapping[str, str]) -> bool:
    """Have little kept of what is compiled for each number of rows.

    The libraries read it when torch is first used, so it comes before that. Returns whether it was
    done: a process that was told a capacity keeps to that.
    """
    if any(name in environ for name in _TOLD):
        return False
    environ.update(CAPACITIES)
    return True
