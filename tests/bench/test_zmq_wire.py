from __future__ import annotations

import pytest

from pd_grpc.bench.legs import BenchRequest, allocate_request
from pd_grpc.bench.zmq_wire import (
    MissingExtra,
    load,
    pack_answer,
    pack_request,
    unpack_answer,
    unpack_request,
)
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import decode_pb2


def test_an_allocate_comes_out_as_it_went_in() -> None:
    request = BenchRequest("r-1", 100, 7, (("d0", "127.0.0.1:1"),))
    allocate = allocate_request(request, "s-1", 42, PrefillConfig())
    assert unpack_request(pack_request(3, allocate)) == (3, allocate)


def test_a_grant_comes_out_as_it_went_in() -> None:
    grant = decode_pb2.AllocateResponse(grant_id="g-1")
    assert unpack_answer(pack_answer(3, grant)) == (3, grant)


def test_a_refusal_comes_out_as_its_status() -> None:
    status = Fault(Reason.NO_BLOCKS, "none free").status().SerializeToString()
    assert unpack_answer(pack_answer(3, status)) == (3, status)


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingExtra, match=r"no_such_package .*`pip install pd-grpc\[bench\]"):
        load("no_such_package")
