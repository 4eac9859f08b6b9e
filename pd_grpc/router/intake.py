"""From a client's request to one that can be routed: validated, tokenized, defaults filled in."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pd_grpc.engine.base import Tokenizer
from pd_grpc.protocol.choices import choice_seed, choices_errors, choices_of, of_one
from pd_grpc.protocol.faults import Fault, Reason, bad_request
from pd_grpc.protocol.messages import (
    lacking_feature,
    sampling_from_proto,
    scope_errors,
    token_errors,
    unbuilt_sampling,
    unbuilt_scope,
)
from pd_grpc.protocol.refs import name_errors
from pd_grpc.protocol.sampling import FieldError, Sampling, sampling_errors, vocabulary_errors
from pd_grpc.v1 import inference_pb2, sampling_pb2

T = TypeVar("T")

_LONG_TEXT_CHARS = 4096
"""Tokenizing more than this would hold the loop for milliseconds."""

_SEED_BITS = 64


@dataclass(frozen=True)
class Limits:
    """What the instances behind the router can take."""

    max_model_len: int
    vocab_size: int
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RoutableRequest:
    """A request as both legs carry it. `params` is `sampling` as sent, seed and max_tokens set;
    `scope` is None where the client sent none. It is for `choices` answers, and is itself the one
    numbered `choice`."""

    request_id: str
    token_ids: list[int]
    generated: list[int]
    sampling: Sampling
    params: sampling_pb2.SamplingParams
    scope: sampling_pb2.RequestScope | None = None
    choices: int = 1
    choice: int = 0

    def of_choice(self, choice: int) -> RoutableRequest:
        """The same for another choice: with the seed of that one, where there is a seed."""
        params = of_one(self.params)
        if params.HasField("seed"):
            params.seed = choice_seed(params.seed, choice)
        sampling = replace(self.sampling, seed=params.seed)
        return replace(self, params=params, sampling=sampling, choice=choice)

    @property
    def prompt_tokens(self) -> int:
        """Tokens P computes: the prompt and the output the client has already."""
        return len(self.token_ids) + len(self.generated)

    @property
    def total_tokens(self) -> int:
        """Most tokens that will be held for it."""
        return len(self.token_ids) + self.sampling.max_tokens


def check_shape(request: inference_pb2.GenerateRequest) -> str:
    """Everything that can be refused without a tokenizer or an instance; returns the prompt's kind.

    Faults: FEATURE for a reserved field in use, BAD_REQUEST naming every other field that is wrong.
    """
    unbuilt = unbuilt_sampling(of_one(request.sampling)) or unbuilt_scope(request.scope)
    if unbuilt is not None:
        text = f"{unbuilt} is reserved and not built"
        raise Fault(Reason.FEATURE, text, {"feature": unbuilt})
    errors = name_errors(request.request_id, "request_id") + scope_errors(request.scope)
    if request.HasField("handoff"):
        errors.append(FieldError("handoff", "must not be set; the router makes it"))
    kind: str | None = request.WhichOneof("prompt")
    if kind is None:
        errors.append(FieldError("prompt", "one of text, messages and token_ids must be set"))
    else:
        errors += _emptiness(request, kind)
    # A default max_tokens may shrink or grow; min_tokens is measured against the one that results.
    stand_in = request.sampling.max_tokens or max(1, request.sampling.min_tokens)
    errors += sampling_errors(sampling_from_proto(request.sampling, stand_in))
    errors += choices_errors(request.sampling)
    if errors:
        raise bad_request(errors)
    assert kind is not None
    return kind


def _emptiness(request: inference_pb2.GenerateRequest, kind: str) -> list[FieldError]:
    """What is missing in a prompt without content, by the field that should have it."""
    if kind == "text":
        return [] if request.text else [FieldError("text", "the prompt must not be empty")]
    if kind == "token_ids":
        some = bool(request.token_ids.ids)
        return [] if some else [FieldError("token_ids", "must have at least one token")]
    messages = request.messages.messages
    if not messages:
        return [FieldError("messages", "must have at least one message")]
    if any(message.content for message in messages):
        return []
    return [FieldError("messages.messages[0].content", "the prompt must not be empty")]


async def tokenize(
    request: inference_pb2.GenerateRequest, kind: str, tokenizer: Tokenizer
) -> list[int]:
    """Token ids of the prompt; long texts in a thread. Fault BAD_REQUEST when the chat template
    refuses the messages, or nothing is left of the text."""
    if kind == "token_ids":
        return list(request.token_ids.ids)
    if kind == "text":
        size = len(request.text)
        token_ids = await _encode(size, tokenizer.encode, request.text)
    else:
        turns = [(m.role, m.content) for m in request.messages.messages]
        size = sum(len(content) for _, content in turns)
        try:
            token_ids = await _encode(size, tokenizer.encode_chat, turns)
        except ValueError as error:
            raise bad_request([FieldError("messages", str(error))]) from error
    if not token_ids:
        raise bad_request([FieldError(kind, "the prompt has no tokens")])
    return token_ids


async def _encode(size: int, encode: Callable[[T], list[int]], value: T) -> list[int]:
    if size > _LONG_TEXT_CHARS:
        return await asyncio.to_thread(encode, value)
    return encode(value)


def fit(
    request: inference_pb2.GenerateRequest,
    request_id: str,
    kind: str,
    token_ids: Sequence[int],
    limits: Limits,
    default_max_tokens: int,
) -> RoutableRequest:
    """Measure the request against the model and fill in max_tokens and seed.

    Faults: BAD_REQUEST for a prompt longer than the model and a token id outside the vocabulary,
    TOO_LARGE when prompt and max_tokens together exceed the model, FEATURE for one no instance has.
    """
    generated = list(request.generated_token_ids)
    room = limits.max_model_len - len(token_ids)
    errors = []
    if room < 1:
        text = f"the prompt has {len(token_ids)} tokens; the model takes at most"
        errors.append(FieldError(kind, f"{text} {limits.max_model_len - 1} and one of output"))
    errors += token_errors(token_ids, limits.vocab_size, "token_ids.ids")
    errors += token_errors(generated, limits.vocab_size, "generated_token_ids")
    stop_ids = request.sampling.stop_token_ids
    errors += token_errors(stop_ids, limits.vocab_size, "sampling.stop_token_ids")
    if errors:
        raise bad_request(errors)

    params = of_one(request.sampling)
    if not params.max_tokens:
        params.max_tokens = min(default_max_tokens, room)
    if params.max_tokens > room:
        raise _too_large(len(token_ids), params.max_tokens, limits.max_model_len)
    if len(generated) >= params.max_tokens:
        text = f"has {len(generated)} tokens, not fewer than max_tokens ({params.max_tokens})"
        raise bad_request([FieldError("generated_token_ids", text)])
    feature = lacking_feature(params, limits.features)
    if feature is not None:
        text = f"{feature} is not supported by this model"
        raise Fault(Reason.FEATURE, text, {"feature": feature})
    sampling = sampling_from_proto(params)
    if not sampling.greedy and not params.HasField("seed"):
        params.seed = secrets.randbits(_SEED_BITS)
        sampling = sampling_from_proto(params)
    if wrong := sampling_errors(sampling) + vocabulary_errors(sampling, limits.vocab_size):
        raise bad_request(wrong)
    scope = request.scope if request.HasField("scope") else None
    choices = choices_of(request.sampling)
    return RoutableRequest(request_id, list(token_ids), generated, sampling, params, scope, choices)


def _too_large(prompt: int, output: int, total: int) -> Fault:
    needed = prompt + output
    text = f"prompt ({prompt}) and sampling.max_tokens ({output}) need {needed} tokens"
    return Fault(
        Reason.TOO_LARGE,
        f"{text}; the model takes {total}",
        {"needed": str(needed), "total": str(total), "unit": "tokens"},
    )
