"""What is refused before anything is done for it: each by its reason, naming field and limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pd_grpc.conformance.sampling_values import lacking
from pd_grpc.prefill import actions as act
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import sampling_pb2, types_pb2
from tests.prefill.world import World, settle

BAD: list[tuple[dict[str, object], str, str]] = [
    ({"tokens": 0}, "token_ids", "at least one"),
    ({"tokens": 1998}, "token_ids[997]", "ids are below 1000"),
    ({"tokens": 6, "token_ids": [1000]}, "token_ids[6]", "ids are below 1000"),
    ({"generated": (5000,)}, "generated_token_ids[0]", "ids are below 1000"),
    ({"generated": tuple([3] * 16)}, "generated_token_ids", "sampling.max_tokens (16)"),
    ({"max_tokens": 0}, "sampling.max_tokens", "at least 1"),
    ({"decodes": ()}, "decodes", "at least one"),
    ({"decodes": ("nowhere",)}, "decodes[0].endpoint", "host:port"),
    ({"decodes": ("d:1", "d:99999")}, "decodes[1].endpoint", "1 to 65535"),
    ({"decodes": ("http://d:1",)}, "decodes[0].endpoint", "host:port"),
    ({"decodes": ("d:" + "1" * 100_000,)}, "decodes[0].endpoint", "1 to 65535"),
    ({"decode_name": "x" * 129}, "decodes[0].name", "128"),
    ({"request_id": "x" * 129}, "request_id", "128"),
    ({"transfer_id": "a b"}, "ref.transfer_id", "A-Za-z0-9"),
    ({"attempt": 0}, "ref.attempt", "at least 1"),
    ({"sampling": sampling_pb2.SamplingParams(temperature=math.nan)}, "sampling.temperature", ""),
    (
        {"sampling": sampling_pb2.SamplingParams(temperature=-1)},
        "sampling.temperature",
        "0 and 100",
    ),
    ({"sampling": sampling_pb2.SamplingParams(top_p=0)}, "sampling.top_p", "above 0"),
    ({"sampling": sampling_pb2.SamplingParams(min_tokens=17)}, "sampling.min_tokens", "max_tokens"),
    ({"sampling": sampling_pb2.SamplingParams(stop=[""])}, "sampling.stop", "1 to 256"),
]


@pytest.mark.parametrize(("fields", "field", "limit"), BAD)
def test_a_malformed_request_is_refused_by_field(
    world: World, fields: dict[str, object], field: str, limit: str
) -> None:
    fault = world.fault(world.call(**fields))  # type: ignore[arg-type]
    assert fault.reason is Reason.BAD_REQUEST
    found = {wrong.field: wrong.description for wrong in fault.fields}
    assert field in found and limit in found[field]
    assert world.taken(act.OpenSession) == []


def test_a_prompt_longer_than_the_model_is_refused(world: World) -> None:
    fault = world.fault(world.call(tokens=2000))
    assert fault.reason is Reason.BAD_REQUEST
    assert fault.fields[0].field == "token_ids" and "at most 1999" in fault.fields[0].description


def test_a_prompt_that_ps_pool_can_never_hold_is_too_large(world: World) -> None:
    fault = world.fault(world.call(tokens=64 * 4 + 1))
    assert fault.reason is Reason.TOO_LARGE
    assert (fault.metadata["needed"], fault.metadata["total"]) == ("65", "64")


UNBUILT: list[tuple[dict[str, Any], str]] = [
    ({"sampling": sampling_pb2.SamplingParams(n=2)}, "sampling.n"),
    *(({"sampling": sampling}, path) for path, sampling in lacking(())),
    ({"scope": sampling_pb2.RequestScope(adapter="lora")}, "scope.adapter"),
    ({"scope": sampling_pb2.RequestScope(priority=1)}, "scope.priority"),
    (
        {"scope": sampling_pb2.RequestScope(direction=sampling_pb2.DIRECTION_PULL)},
        "scope.direction",
    ),
]


@pytest.mark.parametrize(("fields", "feature"), UNBUILT)
def test_a_feature_that_is_not_built_is_refused(
    world: World, fields: dict[str, Any], feature: str
) -> None:
    fault = world.fault(world.call(**fields))
    assert (fault.reason, fault.metadata["feature"]) == (Reason.FEATURE, feature)


def test_a_call_for_another_instance_is_refused(world: World) -> None:
    fault = world.fault(world.call(prefill_name="p2"))
    assert fault.reason is Reason.WRONG_INSTANCE
    assert fault.metadata == {"meant": "p2", "here": "p"}


def test_the_first_token_ends_the_answer_where_the_model_takes_no_more() -> None:
    world = World(max_model_len=8)
    world.call(tokens=7)
    world.connect()
    world.grant()
    world.step()
    (sent,) = world.taken(act.SendFirstToken)
    assert sent.request.tokens[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
    settle(world)
