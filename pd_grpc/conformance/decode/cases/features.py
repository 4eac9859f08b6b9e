"""D70x: what is reserved, or was not negotiated, is refused by name."""

from __future__ import annotations

from pd_grpc.conformance.calls import check_feature
from pd_grpc.conformance.case import expect_equal
from pd_grpc.conformance.decode.cases.registry import DECODE_CASES as case
from pd_grpc.conformance.decode.handover import HandOver
from pd_grpc.conformance.decode.subject import DecodeHand
from pd_grpc.conformance.sampling_values import (
    SAMPLING_OFF,
    SCOPE_OFF,
    lacking,
    not_of_instances,
    reserved_scopes,
    sampling_with,
)
from pd_grpc.protocol.faults import Reason


@case(700, "All of it but cache_salt is reserved in v1.")
async def scope_in_allocate(d: DecodeHand) -> None:
    """Allocate with each field of scope in turn is refused by its name; no block is used."""
    p = await d.prefill()
    for path, scope in reserved_scopes():
        fault = await p.allocate_refused(d.request(), Reason.FEATURE, path, scope=scope)
        check_feature(fault, path)
    load = await p.load_now()
    expect_equal(load.free_blocks, load.total_blocks, "free_blocks")


@case(
    701,
    "A request that uses one is refused with UNIMPLEMENTED and reason FEATURE by a server"
    " that was not built for it, and so is one that needs a feature which was not negotiated",
)
async def sampling_in_allocate(d: DecodeHand) -> None:
    """Allocate with each reserved field of sampling in turn is refused by the field's name."""
    p = await d.prefill()
    for path, sampling in not_of_instances():
        fault = await p.allocate_refused(d.request(), Reason.FEATURE, path, sampling=sampling)
        check_feature(fault, path)
    load = await p.load_now()
    expect_equal(load.free_blocks, load.total_blocks, "free_blocks")


@case(
    702,
    'A field or value that says "reserved" is part of the protocol\'s shape. A request that'
    " uses one is refused with UNIMPLEMENTED and reason FEATURE by a server that was not"
    " built for it, and so is one that needs a feature which was not negotiated",
)
async def scope_in_generate(d: DecodeHand) -> None:
    """Generate with each field of scope in turn is refused, with a hand-off and without."""
    for local in (False, True):
        for path, scope in reserved_scopes():
            leg = d.generate(d.request(), local=local, scope=scope)
            check_feature(await leg.fails(Reason.FEATURE, path), path)


@case(
    703,
    "A request that uses one is refused with UNIMPLEMENTED and reason FEATURE by a server that"
    " was not built for it, and so is one that needs a feature which was not negotiated; neither"
    " is ever ignored.",
)
async def sampling_in_generate(d: DecodeHand) -> None:
    """Generate with each reserved field of sampling, and with each that needs a feature which D has
    not, is refused, with a hand-off and without."""
    for local in (False, True):
        for path, sampling in not_of_instances() + lacking(d.subject.info.features):
            leg = d.generate(d.request(), local=local, sampling=sampling)
            check_feature(await leg.fails(Reason.FEATURE, path), path)


@case(704, "An Allocate that needs one which Welcome does not list is refused with FEATURE.")
async def features_that_were_not_negotiated(d: DecodeHand) -> None:
    """Allocate with each field of sampling that needs a feature is refused by the field's name in
    a session without features."""
    p = await d.prefill()
    for path, sampling in lacking(()):
        request = d.request()
        fault = await p.allocate_refused(request, Reason.FEATURE, path, sampling=sampling)
        check_feature(fault, path)
    await p.allocate(request)


@case(705, "0 and 1 mean one.")
async def reserved_fields_that_are_off(d: DecodeHand) -> None:
    """Fields that are reserved or a feature, with the values that mean off, change nothing: the
    answer is the same."""
    p = await d.prefill()
    request = d.request(sampling=sampling_with(**SAMPLING_OFF))
    leg = d.generate(request, scope=SCOPE_OFF)
    grant = await p.allocate(request, scope=SCOPE_OFF)
    await HandOver(d, p, request, grant, leg).completes()
