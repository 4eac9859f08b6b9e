"""Writes docs/sim.md: the sim engine's rule out of its docstrings, part of `make docs`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from pd_grpc.engine import sim
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from tools.marked_parts import with_parts

PAGE = Path(__file__).parent.parent / "docs" / "sim.md"


def _rule() -> str:
    """The module's docstring without its first paragraph, which introduces it."""
    return inspect.cleandoc(sim.__doc__ or "").split("\n\n", 1)[1]


PARTS: dict[str, Callable[[], str]] = {
    "sim_rule": _rule,
    "sim_tokenizer": lambda: inspect.getdoc(SimTokenizer) or "",
}


def main() -> int:
    """Rewrite the page in place."""
    PAGE.write_text(with_parts(PAGE.read_text(), PARTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
