"""From Python values to a GenerateRequest, for clients."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from pd_grpc.protocol.endpoints import check_endpoint
from pd_grpc.v1 import inference_pb2

MAX_TIMEOUT_S = 1e9
"""grpc takes a deadline much further away for one that has passed."""

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class RequestError(ValueError):
    """A request that cannot be sent: `field` is the argument at fault, `message` says what is
    allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


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
            _set(request, name, named.pop(name))
    if "cache_salt" in named:
        _set(request.scope, "cache_salt", named.pop("cache_salt"))
    if text is not None:
        _set(request, "text", text)
    elif messages is not None:
        request.messages.SetInParent()
        with _named("messages"):
            for role, content in messages:
                request.messages.messages.add(role=role, content=content)
    else:
        request.token_ids.SetInParent()
        with _named("token_ids"):
            request.token_ids.ids.extend(token_ids or ())
    _set_grammar(request, named)
    for name, value in named.items():
        _set(request.sampling, name, value)
    return request


def _set_grammar(request: inference_pb2.GenerateRequest, named: dict[str, Any]) -> None:
    """Take out what the answer is to follow, and set it."""
    grammars = {name: named.pop(name) for name in ("json_schema", "regex") if name in named}
    if len(grammars) > 1:
        raise RequestError("regex", "cannot be given beside json_schema")
    for name, grammar in grammars.items():
        allowed = "text or a mapping" if name == "json_schema" else "text"
        with _named(name):
            if name == "json_schema" and isinstance(grammar, Mapping):
                grammar = json.dumps(dict(grammar), ensure_ascii=False)
            if not isinstance(grammar, str):
                raise TypeError(f"must be {allowed}, not {type(grammar).__name__}")
            _set(request.sampling.structured_output, name, grammar)


def _set(message: Any, name: str, value: Any) -> None:
    """Set a field by its name, or add a sequence or a mapping to it. RequestError when it cannot
    be."""
    with _named(name, _bounds(message, name, value)):
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)


@contextlib.contextmanager
def _named(field: str, bounds: str = "") -> Iterator[None]:
    """What a message cannot carry becomes a RequestError of this field."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise RequestError(field, "must be text that UTF-8 can carry") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(field, bounds or str(error)) from error


def _bounds(message: Any, name: str, value: Any) -> str:
    """What a whole number in this field may be; empty for fields of other kinds."""
    field = message.DESCRIPTOR.fields_by_name.get(name)
    if field is None or not isinstance(value, int) or field.cpp_type not in _INTEGERS:
        return ""
    low, high = _INTEGERS[field.cpp_type]
    limit = f"at least {low}" if value < low else f"at most {high}"
    return f"must be {limit}, not {value}"


def check_timeout(timeout_s: float | None) -> None:
    """RequestError unless it is None or a number of seconds that a call can have."""
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        limit = f"must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds"
        raise RequestError("timeout_s", f"{limit}, not {timeout_s:g}")


def checked_endpoint(endpoint: str) -> str:
    """`endpoint` if it is host:port; RequestError if not."""
    try:
        return check_endpoint(endpoint)
    except ValueError as error:
        raise RequestError("endpoint", str(error)) from error
