"""The parts of the explorer: a modelled wire, processes around the real machines, a world of them,
what must hold in it, and the ways to go through it."""
