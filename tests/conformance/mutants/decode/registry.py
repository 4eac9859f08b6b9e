"""Where the faults of D are registered."""

from tests.conformance.mutants.registry import Mutants

DECODE_MUTANTS = Mutants()
