"""From Python values to a GenerateRequest, for clients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from pd_grpc.protocol.endpoints import check_endpoint
from pd_grpc.protocol.field_values import RequestError, items_of, set_field, type_error, type_name
from pd_grpc.v1 import inference_pb2

MAX_TIMEOUT_S = 1e9
"""grpc takes a deadline much further away for one that has passed."""

_PAIRS = "(role, content) pairs"


def build_request(
    text: str | None,
    messages: Sequence[tuple[str, str]] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> inference_pb2.GenerateRequest:
    """A request with exactly one prompt; `options` are fields of `SamplingParams`, `request_id`,
    `generated_token_ids` and `cache_salt`. RequestError for what the wire cannot carry (a negative
    seed, a fraction of a token); the rest is the server's to judge."""
    if sum(prompt is not None for prompt in (text, messages, token_ids)) != 1:
        raise RequestError("text", "give exactly one of text, messages and token_ids")
    named: dict[str, Any] = dict(options)
    request = inference_pb2.GenerateRequest()
    for name in ("request_id", "generated_token_ids"):
        if name in named:
            set_field(request, name, named.pop(name))
    if "cache_salt" in named:
        set_field(request.scope, "cache_salt", named.pop("cache_salt"))
    if text is not None:
        set_field(request, "text", text)
    elif messages is not None:
        _add_messages(request, messages)
    else:
        request.token_ids.SetInParent()
        set_field(request.token_ids, "ids", token_ids, "token_ids")
    _set_grammar(request, named)
    for name, value in named.items():
        set_field(request.sampling, name, value)
    return request


def _add_messages(request: inference_pb2.GenerateRequest, messages: Any) -> None:
    request.messages.SetInParent()
    for index, pair in enumerate(items_of("messages", _PAIRS, messages)):
        # The two keys of a mapping are not its role and content.
        pairs = isinstance(pair, Sequence) and not isinstance(pair, str | bytes)
        if not pairs or len(pair) != 2:
            came = f"{len(pair)} values" if pairs else type_name(pair)
            raise RequestError("messages", f"must be {_PAIRS}, not {came}", f"item {index}")
        message = request.messages.messages.add()
        for name, value in zip(("role", "content"), pair, strict=True):
            set_field(message, name, value, "messages", f"{name} of item {index}")


def _set_grammar(request: inference_pb2.GenerateRequest, named: dict[str, Any]) -> None:
    """Take out what the answer is to follow, and set it."""
    grammars = {name: named.pop(name) for name in ("json_schema", "regex") if name in named}
    if len(grammars) > 1:
        raise RequestError("regex", "cannot be given beside json_schema")
    for name, grammar in grammars.items():
        if name == "json_schema" and isinstance(grammar, Mapping):
            grammar = _as_json(grammar)
        if not isinstance(grammar, str):
            raise type_error(
                name, "text or a mapping" if name == "json_schema" else "text", grammar
            )
        set_field(request.sampling.structured_output, name, grammar)


def _as_json(schema: Mapping[Any, Any]) -> str:
    try:
        return json.dumps(dict(schema), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("json_schema", f"must be what JSON can say: {error}") from error


def checked_timeout(timeout_s: float | None) -> float | None:
    """`timeout_s` if it is None or a number of seconds that a call can have; RequestError if
    not."""
    if timeout_s is None:
        return None
    seconds = _as_float(timeout_s)
    if seconds is None:
        raise type_error("timeout_s", "a number of seconds", timeout_s)
    if not 0 < seconds <= MAX_TIMEOUT_S:
        limit = f"must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds"
        raise RequestError("timeout_s", f"{limit}, not {seconds:g}")
    return seconds


def _as_float(value: object) -> float | None:
    """None for what is no number; text that spells one is none."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def checked_endpoint(endpoint: str) -> str:
    """`endpoint` if it is host:port; RequestError if not."""
    if not isinstance(endpoint, str):
        raise type_error("endpoint", "host:port", endpoint)
    try:
        return check_endpoint(endpoint)
    except ValueError as error:
        raise RequestError("endpoint", str(error)) from error
