"""The cases for the router, one file for each part of its work."""

from pd_grpc.conformance.modules import import_modules
from pd_grpc.conformance.router.cases.registry import ROUTER_CASES

__all__ = ["ROUTER_CASES"]

import_modules(__name__)
