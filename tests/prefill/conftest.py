"""The played world, for every test of the prefill side."""

from tests.prefill.world import world

__all__ = ["world"]
