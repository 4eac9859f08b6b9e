"""A router understands a P and a D of another age or refuses by name, whichever field is missing
between them, and whatever is said that nobody knows yet."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pd_grpc.conformance.later import UNKNOWN_VALUE
from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.v1 import inference_pb2, prefill_pb2
from tests.compat import routed
from tests.compat.decided import NOT_SENT as NOT_SENT_TO_D
from tests.compat.edits import AddUnknown, FutureValueWhereSet, Strip, fields_of
from tests.compat.routed import Asking

FIELDS = dict(
    fields_of(
        prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    )
)


@dataclass(frozen=True)
class Refusal:
    """A field left out, and what the client is told."""

    field: str
    reason: Reason
    named: str
    asking: Asking = routed.plain


REFUSED = [
    Refusal("PrefillRequest.ref", Reason.BAD_REQUEST, "ref."),
    Refusal("PrefillRequest.token_ids", Reason.BAD_REQUEST, "token_ids"),
    Refusal(
        "PrefillRequest.generated_token_ids",
        Reason.HANDOFF_MISMATCH,
        "prompt_tokens",
        routed.continued,
    ),
    Refusal("PrefillRequest.sampling", Reason.BAD_REQUEST, "sampling.max_tokens"),
    Refusal("PrefillRequest.decodes", Reason.BAD_REQUEST, "decodes"),
    Refusal("DecodeTarget.endpoint", Reason.BAD_REQUEST, "decodes[0].endpoint"),
    Refusal("TransferRef.transfer_id", Reason.BAD_REQUEST, "ref.transfer_id"),
    Refusal("TransferRef.attempt", Reason.BAD_REQUEST, "ref.attempt"),
    Refusal("SamplingParams.max_tokens", Reason.BAD_REQUEST, "sampling.max_tokens"),
    Refusal("GenerateRequest.token_ids", Reason.BAD_REQUEST, "token_ids"),
    Refusal("TokenIds.ids", Reason.BAD_REQUEST, "token_ids"),
    Refusal("GenerateRequest.sampling", Reason.BAD_REQUEST, "sampling.max_tokens"),
    Refusal(
        "StructuredOutput.regex",
        Reason.BAD_REQUEST,
        "sampling.structured_output",
        routed.with_features,
    ),
    Refusal(
        "GenerateRequest.generated_token_ids",
        Reason.HANDOFF_MISMATCH,
        "prompt_tokens",
        routed.continued,
    ),
    Refusal("PrefillRequest.scope", Reason.HANDOFF_MISMATCH, "scope.cache_salt", routed.salted),
    Refusal("GenerateRequest.scope", Reason.HANDOFF_MISMATCH, "scope.cache_salt", routed.salted),
    Refusal("Handoff.ref", Reason.BAD_REQUEST, "ref."),
    Refusal("GenerateResponse.finish_reason", Reason.WRONG_STATE, "without its answer"),
    Refusal(
        "GetModelInfoResponse.features",
        Reason.FEATURE,
        "sampling.logprobs",
        routed.with_logprobs,
    ),
]

WORKS = [
    *(f"PrefillRequest.{name}" for name in ("request_id", "prefill_name")),
    "TransferRef.decode_epoch",
    "DecodeTarget.name",
    *(f"PrefillResponse.{name}" for name in ("queued", "progress", "handed_off")),
    "Progress.computed_tokens",
    *(f"HandedOff.{name}" for name in ("decode", "usage", "timings")),
    *(f"Instance.{name}" for name in ("name", "epoch", "role")),
    *(f"Timings.{name}" for name in ("queue", "prepare", "allocate", "compute")),
    *(f"Timings.{name}" for name in ("first_token", "exposed_send")),
    # D then prefills the prompt itself.
    "GenerateRequest.handoff",
    "GenerateRequest.request_id",
    *(f"Handoff.{name}" for name in ("decode_name", "prefill_name")),
    "GenerateResponse.decode_instance",
    *(f"GetModelInfoResponse.{name}" for name in ("model", "tokenizer", "eos_token_ids")),
    # P and D refuse what is too much for them.
    *(f"GetModelInfoResponse.{name}" for name in ("max_model_len", "vocab_size", "layout")),
    # The router compares no layouts; P and D do.
    *(f"KvLayout.{name}" for name in ("model", "positions", "block_size", "groups", "format")),
    *(f"KvGroup.{name}" for name in ("kind", "layers", "planes")),
    *(f"Plane.{name}" for name in ("kind", "dtype", "heads", "head_dim")),
]

DEFAULTS = [
    *(f"SamplingParams.{name}" for name in ("min_tokens", "temperature", "top_p", "top_k")),
    *(f"SamplingParams.{name}" for name in ("seed", "stop", "stop_token_ids", "ignore_eos")),
    *(f"SamplingParams.{name}" for name in FEATURES),
]
"""Left out of both legs alike these are what they are without a word: nobody can know better."""

UNNOTICED = {
    "GenerateResponse.token_ids": routed.plain,
    "GenerateResponse.usage": routed.plain,
    "Usage.prompt_tokens": routed.plain,
    "Usage.completion_tokens": routed.plain,
    "GenerateResponse.logprobs": routed.with_logprobs,
    "PositionLogprobs.chosen": routed.with_logprobs,
    "PositionLogprobs.top": routed.with_logprobs,
    "TokenLogprob.token_id": routed.with_logprobs,
    "TokenLogprob.logprob": routed.with_logprobs,
}
"""What D leaves out of its own answer is left out of the client's; nothing is put in its place."""

_ROUTERS = "the router says it to its client, D does not"
_TEXT = "D takes token ids only"
_ONE_D = "there is one D, and nothing waits"
NOT_SENT = {
    **{name: why for name, why in NOT_SENT_TO_D.items() if name in FIELDS},
    "PrefillResponse.placing": _ONE_D,
    "Placing.decode": _ONE_D,
    "Queued.ahead": _ONE_D,
    "Usage.cached_tokens": "each cluster here answers one request, and nothing is found",
    "Timings.route": _ROUTERS,
    "Timings.total": _ROUTERS,
    "GenerateRequest.text": _TEXT,
    "GenerateRequest.messages": _TEXT,
    "ChatMessages.messages": _TEXT,
    "ChatMessage.role": _TEXT,
    "ChatMessage.content": _TEXT,
    "GenerateResponse.text": _ROUTERS,
    "GenerateResponse.timings": _ROUTERS,
    "GenerateResponse.prefill_instance": _ROUTERS,
    "GenerateResponse.request_id": _ROUTERS,
    "GenerateResponse.choice": _ROUTERS,
    "GenerateResponse.total_usage": _ROUTERS,
}


def test_of_every_field_it_is_decided_what_its_absence_means() -> None:
    decided = [*(r.field for r in REFUSED), *WORKS, *DEFAULTS, *UNNOTICED, *NOT_SENT]
    decided.append("RequestScope.cache_salt")
    assert sorted(decided) == sorted(FIELDS)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.field)
async def test_without_what_is_needed_the_client_is_told_what(refusal: Refusal) -> None:
    strip = Strip(refusal.field)
    answer = await refusal.asking(strip)
    assert strip.met
    fault = answer.fault
    assert isinstance(fault, Fault) and fault.reason is refusal.reason, fault
    assert refusal.named in f"{fault.message} {dict(fault.metadata)}"
    assert answer.tokens == answer.meant()[: len(answer.tokens)]


@pytest.mark.parametrize("field", WORKS)
async def test_without_what_has_a_default_the_answer_is_right(field: str) -> None:
    strip = Strip(field)
    answer = await routed.plain(strip)
    assert strip.met
    assert answer.fault is None and answer.tokens == answer.meant() and answer.whole


async def test_a_salt_left_out_on_both_legs_is_no_salt() -> None:
    strip = Strip("RequestScope.cache_salt")
    answer = await routed.salted(strip)
    assert strip.met == 2
    assert answer.fault is None and answer.tokens == answer.meant() and answer.whole


@pytest.mark.parametrize("field", DEFAULTS)
async def test_sampling_left_out_on_both_legs_is_sampling_by_default(field: str) -> None:
    strip = Strip(field)
    name = field.removeprefix("SamplingParams.")
    answer = await (routed.with_features if name in FEATURES else routed.sampled)(strip)
    assert strip.met == 2
    assert answer.fault is None and answer.tokens == answer.meant(without=name)


@pytest.mark.parametrize("field", UNNOTICED)
async def test_what_d_leaves_out_of_its_answer_is_not_made_up(field: str) -> None:
    strip = Strip(field)
    answer = await UNNOTICED[field](strip)
    assert strip.met
    assert answer.fault is None
    kept = [] if field == "GenerateResponse.token_ids" else answer.meant()
    assert answer.tokens == kept
    assert answer.whole == (field.partition(".")[0] in ("PositionLogprobs", "TokenLogprob"))


@pytest.mark.parametrize("field", ["Instance.role", "KvGroup.kind", "Plane.kind"])
async def test_a_kind_that_nobody_knows_yet_is_no_matter_of_the_router(field: str) -> None:
    future = FutureValueWhereSet(field)
    answer = await routed.plain(future)
    assert future.met
    assert answer.fault is None and answer.tokens == answer.meant() and answer.whole


async def test_an_end_of_which_the_reason_is_not_known_yet_is_an_end() -> None:
    future = FutureValueWhereSet("GenerateResponse.finish_reason")
    answer = await routed.plain(future)
    assert future.met == 1
    assert answer.fault is None and answer.tokens == answer.meant()
    assert answer.last.finish_reason == UNKNOWN_VALUE


@pytest.mark.parametrize(
    "asking",
    [routed.plain, routed.sampled, routed.with_logprobs, routed.continued, routed.salted],
    ids=lambda asking: asking.__name__,
)
async def test_fields_that_nobody_knows_yet_change_nothing(asking: Asking) -> None:
    unknown = AddUnknown()
    answer = await asking(unknown)
    assert {"PrefillRequest", "HandedOff", "GenerateRequest", "GenerateResponse"} <= unknown.met
    assert answer.fault is None and answer.tokens == answer.meant() and answer.whole
    assert unknown.fields & set(NOT_SENT) == set()
