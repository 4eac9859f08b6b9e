"""Where the faults of the router are registered."""

from tests.conformance.mutants.registry import Mutants

ROUTER_MUTANTS = Mutants()
