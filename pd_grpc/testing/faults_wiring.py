"""Putting an injector into an instance of ours."""

from __future__ import annotations

from functools import partial

from pd_grpc.protocol.interception import Interceptors
from pd_grpc.testing.faults import Injector
from pd_grpc.testing.faults_client import client_interceptors
from pd_grpc.testing.faults_futures import StruckChannel
from pd_grpc.testing.faults_server import FaultServerInterceptor


def injected(injector: Injector) -> Interceptors:
    """For the `interceptors` of `start_prefill`, `start_decode` and `start_router`: every call that
    the instance serves and makes may be struck."""
    return Interceptors(
        server=(FaultServerInterceptor(injector),),
        client=client_interceptors(injector),
        futures=partial(StruckChannel, injector=injector),
    )
