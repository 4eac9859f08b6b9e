"""Between the messages of pd_grpc.v1 and the types the rules work on."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Container, Sequence
from typing import cast

from google.protobuf.duration_pb2 import Duration

from pd_grpc.protocol.block_hashes import SALT_BYTES
from pd_grpc.protocol.layout import CANONICAL, GroupKind, KvGroup, KvLayout, Plane, PlaneKind
from pd_grpc.protocol.sampling import FieldError, GrammarKind, Sampling, StructuredOutput
from pd_grpc.v1 import layout_pb2, sampling_pb2

MAX_DURATION_S = 315_576_000_000
"""The longest Duration that protobuf allows, some ten thousand years."""

MAX_TOKENS_PER_MESSAGE = 4096
"""Of an answer: keeps a message with 20 log-probabilities per token below gRPC's default limit of
4 MiB."""

INLINE = frozenset({layout_pb2.TRANSPORT_UNSPECIFIED, layout_pb2.TRANSPORT_INLINE})
"""The values that mean KV within the chunks."""

_BUILT_DIRECTIONS = (sampling_pb2.DIRECTION_UNSPECIFIED, sampling_pb2.DIRECTION_PUSH)

_UINT32 = next(code for code in "IL" if array(code).itemsize == 4)
"""The type code of C integers of 32 bits here."""


def duration(seconds: float) -> Duration:
    """Seconds as a Duration, kept within 0 and what protobuf allows."""
    nanos = round(min(max(0.0, seconds), MAX_DURATION_S) * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def seconds(value: Duration) -> float:
    """A Duration in seconds, kept within what protobuf allows: a peer may send any number."""
    return min(max(value.seconds + value.nanos / 1e9, -MAX_DURATION_S), MAX_DURATION_S)


def sampling_to_proto(s: Sampling) -> sampling_pb2.SamplingParams:
    """As sent on the wire, every optional field set."""
    return sampling_pb2.SamplingParams(
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=s.seed,
        stop=s.stop,
        stop_token_ids=s.stop_token_ids,
        ignore_eos=s.ignore_eos,
        logprobs=s.logprobs,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        logit_bias=dict(s.logit_bias),
        structured_output=_grammar_to_proto(s.structured_output),
    )


def sampling_from_proto(p: sampling_pb2.SamplingParams, default_max_tokens: int = 0) -> Sampling:
    """With defaults filled in; not validated (see `sampling_errors`)."""
    return Sampling(
        max_tokens=p.max_tokens or default_max_tokens,
        min_tokens=p.min_tokens,
        temperature=p.temperature if p.HasField("temperature") else 1.0,
        top_p=p.top_p if p.HasField("top_p") else 1.0,
        top_k=p.top_k,
        seed=p.seed if p.HasField("seed") else 0,
        stop=tuple(p.stop),
        stop_token_ids=tuple(p.stop_token_ids),
        ignore_eos=p.ignore_eos,
        logprobs=p.logprobs if p.HasField("logprobs") else None,
        min_p=p.min_p,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        repetition_penalty=p.repetition_penalty if p.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(p.logit_bias.items())),
        structured_output=grammar_of(p),
    )


def grammar_of(p: sampling_pb2.SamplingParams) -> StructuredOutput | None:
    """What the answer is to follow; None for nothing."""
    if not p.HasField("structured_output"):
        return None
    kind: str | None = p.structured_output.WhichOneof("grammar")
    if kind is None:
        return StructuredOutput(None, "")
    return StructuredOutput(GrammarKind(kind), getattr(p.structured_output, kind))


def _grammar_to_proto(grammar: StructuredOutput | None) -> sampling_pb2.StructuredOutput | None:
    if grammar is None:
        return None
    message = sampling_pb2.StructuredOutput()
    if grammar.kind is not None:
        setattr(message, grammar.kind.value, grammar.text)
    return message


def lacking_feature(p: sampling_pb2.SamplingParams, features: Container[str]) -> str | None:
    """Name of the first sampling field in use that needs a feature which `features` lacks."""
    used = {
        "logprobs": p.HasField("logprobs"),
        "min_p": p.min_p != 0,
        "presence_penalty": p.presence_penalty != 0,
        "frequency_penalty": p.frequency_penalty != 0,
        "repetition_penalty": p.HasField("repetition_penalty") and p.repetition_penalty != 1,
        "logit_bias": len(p.logit_bias) > 0,
        "structured_output": p.HasField("structured_output"),
    }
    lacking = (name for name, on in used.items() if on and name not in features)
    return next((f"sampling.{name}" for name in lacking), None)


def unbuilt_sampling(p: sampling_pb2.SamplingParams) -> str | None:
    """Name of the first reserved sampling field that is in use, if any."""
    used = {
        "n": p.n > 1,
        "prompt_logprobs": p.prompt_logprobs,
    }
    return next((f"sampling.{name}" for name, on in used.items() if on), None)


def unbuilt_scope(p: sampling_pb2.RequestScope) -> str | None:
    """Name of the first reserved request field that is in use, if any."""
    used = {
        "model": bool(p.model),
        "adapter": bool(p.adapter),
        "media_hashes": len(p.media_hashes) > 0,
        "tenant": bool(p.tenant),
        "priority": p.priority != 0,
        "siblings": p.siblings > 1,
        "draft_token_ids": len(p.draft_token_ids) > 0,
        # A later version's direction is as little built as DIRECTION_PULL.
        "direction": p.direction not in _BUILT_DIRECTIONS,
    }
    return next((f"scope.{name}" for name, on in used.items() if on), None)


def scope_errors(p: sampling_pb2.RequestScope) -> list[FieldError]:
    """What is wrong with the request fields that are built."""
    if len(p.cache_salt) <= SALT_BYTES:
        return []
    return [FieldError("scope.cache_salt", f"must have at most {SALT_BYTES} bytes")]


def layout_to_proto(layout: KvLayout) -> layout_pb2.KvLayout:
    """As sent in Hello, Welcome and GetModelInfo."""
    return layout_pb2.KvLayout(
        model=layout.model,
        positions=layout.positions,
        block_size=layout.block_size,
        format=layout.format,
        groups=[
            layout_pb2.KvGroup(
                kind=f"KV_GROUP_KIND_{group.kind.name}",
                layers=group.layers,
                window=group.window,
                planes=[
                    layout_pb2.Plane(
                        kind=f"PLANE_KIND_{plane.kind.name}",
                        dtype=plane.dtype,
                        heads=plane.heads,
                        head_dim=plane.head_dim,
                    )
                    for plane in group.planes
                ],
            )
            for group in layout.groups
        ],
    )


def layout_from_proto(p: layout_pb2.KvLayout) -> KvLayout:
    """With defaults filled in. ValueError names an enum value this version does not know."""
    return KvLayout(
        model=p.model,
        positions=p.positions,
        block_size=p.block_size,
        format=p.format or CANONICAL,
        groups=tuple(_group_from_proto(g, group) for g, group in enumerate(p.groups)),
    )


def _group_from_proto(g: int, p: layout_pb2.KvGroup) -> KvGroup:
    try:
        return KvGroup(
            kind=GroupKind(p.kind or layout_pb2.KV_GROUP_KIND_FULL),
            layers=p.layers,
            window=p.window,
            planes=tuple(Plane(PlaneKind(x.kind), x.dtype, x.heads, x.head_dim) for x in p.planes),
        )
    except ValueError as error:
        raise ValueError(f"groups[{g}]: {error}") from None


def plain_transport(transport: int) -> layout_pb2.Transport:
    """With the default filled in."""
    # The generated code has no type of its own for the values when it runs.
    return cast("layout_pb2.Transport", transport or layout_pb2.TRANSPORT_INLINE)


def transport_name(transport: int) -> str:
    """For people; one that this version does not know by its number."""
    if transport in layout_pb2.Transport.values():
        return layout_pb2.Transport.Name(cast("layout_pb2.Transport", transport))
    return str(transport)


def transport_label(transport: int) -> str:
    """As spans and metrics have it, such as `shm`; one that is not the protocol's own by its
    number."""
    return transport_name(plain_transport(transport)).removeprefix("TRANSPORT_").lower()


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the tokens as little-endian uint32; 32 bytes."""
    words = array(_UINT32, token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(words).digest()


def token_errors(token_ids: Sequence[int], vocab_size: int, field: str) -> list[FieldError]:
    """The first token id outside the vocabulary, if any. Fastest over a list or a tuple, as a
    prompt may have a million tokens and a message's field makes each an object anew."""
    if not token_ids or max(token_ids) < vocab_size:
        return []
    for i, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            limit = f"{token_id} is outside the vocabulary; ids are below {vocab_size}"
            return [FieldError(f"{field}[{i}]", limit)]
    return []
