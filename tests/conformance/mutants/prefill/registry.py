"""Where the faults of P are registered."""

from tests.conformance.mutants.registry import Mutants

PREFILL_MUTANTS = Mutants()
