"""Every planted fault of the router, one file for each part of its work, as the cases are."""

from pd_grpc.conformance.modules import import_modules
from tests.conformance.mutants.router.registry import ROUTER_MUTANTS

__all__ = ["ROUTER_MUTANTS"]

import_modules(__name__)
