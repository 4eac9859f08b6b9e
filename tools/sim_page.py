"""The parts of docs/sim.md: the sim engine's rule, out of its docstrings."""

from __future__ import annotations

import inspect

from pd_grpc.engine import sim
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from tools.marked_parts import Parts


def _rule() -> str:
    """The module's docstring without its first paragraph, which introduces it."""
    return inspect.cleandoc(sim.__doc__ or "").split("\n\n", 1)[1]


PARTS: Parts = {
    "sim_rule": _rule,
    "sim_tokenizer": lambda: inspect.getdoc(SimTokenizer) or "",
}
