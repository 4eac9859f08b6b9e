"""What a Prefill call must look like to be taken in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_grpc.protocol.endpoints import ENDPOINT_LIMIT, check_endpoint
from pd_grpc.protocol.faults import Fault, Reason, bad_request, not_meant
from pd_grpc.protocol.layout import KvLayout
from pd_grpc.protocol.messages import (
    lacking_feature,
    sampling_from_proto,
    scope_errors,
    token_errors,
    unbuilt_sampling,
    unbuilt_scope,
)
from pd_grpc.protocol.refs import name_errors, ref_errors
from pd_grpc.protocol.sampling import FieldError, Sampling, sampling_errors, vocabulary_errors
from pd_grpc.protocol.shards import Place
from pd_grpc.v1 import prefill_pb2


@dataclass(frozen=True)
class ModelLimits:
    """What P's engine and pool can take."""

    layout: KvLayout
    vocab_size: int
    max_model_len: int
    num_blocks: int
    features: frozenset[str]
    eos_token_ids: frozenset[int]
    shards: tuple[Place, ...]
    """Into which P's KV is cut, at least one."""


def tokens_of(request: prefill_pb2.PrefillRequest) -> tuple[int, ...]:
    """Prompt and generated tokens: what is computed and sent."""
    return (*request.token_ids[:], *request.generated_token_ids[:])


def check_prefill(
    request: prefill_pb2.PrefillRequest, tokens: Sequence[int], name: str, limits: ModelLimits
) -> Sampling:
    """The sampling of a request that can be taken in by the instance `name`; Fault otherwise.
    `tokens` are its `tokens_of`, which is slow and wanted by others too."""
    if request.prefill_name not in ("", name):
        meant = request.prefill_name
        raise not_meant(Reason.WRONG_INSTANCE, f"this is {name}, not {meant}", meant, name)
    _check_features(request, limits)
    sampling = sampling_from_proto(request.sampling)
    wrong = [
        *ref_errors(request.ref),
        *name_errors(request.request_id, "request_id"),
        *_token_errors(request, tokens, limits),
        *sampling_errors(sampling),
        *vocabulary_errors(sampling, limits.vocab_size),
        *_answer_errors(request, sampling),
        *_decode_errors(request),
        *scope_errors(request.scope),
    ]
    if wrong:
        raise bad_request(wrong)
    _check_size(request, limits)
    return sampling


def _check_features(request: prefill_pb2.PrefillRequest, limits: ModelLimits) -> None:
    feature = (
        unbuilt_sampling(request.sampling)
        or unbuilt_scope(request.scope)
        or lacking_feature(request.sampling, limits.features)
    )
    if feature is not None:
        raise Fault(
            Reason.FEATURE, f"{feature} is not supported by this engine", {"feature": feature}
        )


def _token_errors(
    request: prefill_pb2.PrefillRequest, tokens: Sequence[int], limits: ModelLimits
) -> list[FieldError]:
    if not request.token_ids:
        return [FieldError("token_ids", "must have at least one token")]
    if len(tokens) >= limits.max_model_len:
        text = f"{len(tokens)} tokens with the output so far"
        return [FieldError("token_ids", f"{text}; at most {limits.max_model_len - 1} fit")]
    prompt = len(request.token_ids)
    return [
        *token_errors(tokens[:prompt], limits.vocab_size, "token_ids"),
        *token_errors(tokens[prompt:], limits.vocab_size, "generated_token_ids"),
    ]


def _answer_errors(request: prefill_pb2.PrefillRequest, s: Sampling) -> list[FieldError]:
    generated = len(request.generated_token_ids)
    if s.max_tokens >= 1 and generated >= s.max_tokens:
        limit = f"{generated} tokens leave none of sampling.max_tokens ({s.max_tokens})"
        return [FieldError("generated_token_ids", limit)]
    return []


def _decode_errors(request: prefill_pb2.PrefillRequest) -> list[FieldError]:
    if not request.decodes:
        return [FieldError("decodes", "must name at least one decode instance")]
    wrong: list[FieldError] = []
    for i, target in enumerate(request.decodes):
        wrong += name_errors(target.name, f"decodes[{i}].name")
        try:
            check_endpoint(target.endpoint)
        except ValueError:
            wrong.append(FieldError(f"decodes[{i}].endpoint", ENDPOINT_LIMIT))
    return wrong


def _check_size(request: prefill_pb2.PrefillRequest, limits: ModelLimits) -> None:
    tokens = len(request.token_ids) + len(request.generated_token_ids)
    needed = limits.layout.blocks_for(tokens)
    if needed > limits.num_blocks:
        raise Fault(
            Reason.TOO_LARGE,
            f"token_ids: {tokens} tokens take {needed} blocks of {limits.layout.block_size}; "
            f"this prefill instance has {limits.num_blocks}",
            {"field": "token_ids", "needed": str(needed), "total": str(limits.num_blocks)},
        )
