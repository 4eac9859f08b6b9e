"""What becomes of a request when a peer leaves a field out: decided for every field.

Fields are left out on both ways between P and D, wherever the message stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pd_grpc.conformance.later import UNKNOWN_VALUE
from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.protocol.faults import Reason
from tests.compat import scenes
from tests.compat.scenes import Play

RIGHT = "the right answer"
LEFT = "nothing more, until the client leaves"


@dataclass(frozen=True)
class Case:
    """A field left out in a scene, and how both legs end."""

    field: str
    scene: Play
    prefill: Reason | None = None
    """How P ends it; None is a hand-over, or that its caller has left."""
    client: Reason | str | None = RIGHT
    """How D's client ends; None is any fault, or LEFT."""
    named: str = ""
    """What the fault that P ends with names."""
    may_work: bool = False
    """It depends on which message comes first whether P ends so or the answer is right."""

    def __str__(self) -> str:
        return f"{self.field}-{self.scene.__name__}"


def works(scene: Play, *fields: str) -> list[Case]:
    """Without these the answer is right all the same."""
    return [Case(field, scene) for field in fields]


def refused(scene: Play, reason: Reason, *fields: str, named: str = "") -> list[Case]:
    """Without these P's caller hears why, and the client gets no complete answer. What the refusal
    names is the field itself unless told."""
    found = (named or field.rpartition(".")[2] for field in fields)
    return [Case(f, scene, reason, None, n) for f, n in zip(fields, found, strict=True)]


_GONE = Case("", scenes.client_gone, Reason.CLIENT_GONE, LEFT)
_LEAVES = Case("", scenes.caller_gone, None, Reason.CLIENT_GONE)

CASES = [
    # The session.
    *refused(scenes.plain, Reason.WRONG_STATE, "SessionRequest.hello"),
    *refused(scenes.plain, Reason.WRONG_STATE, "SessionResponse.welcome"),
    *refused(scenes.plain, Reason.WRONG_STATE, "Hello.instance", named="hello.instance.name"),
    *refused(scenes.plain, Reason.WRONG_STATE, "Hello.layouts", named="hello.layouts"),
    *refused(scenes.plain, Reason.WRONG_STATE, "Instance.name", named="hello.instance.name"),
    *refused(scenes.plain, Reason.WRONG_STATE, "Instance.epoch", named="hello.instance.epoch"),
    *refused(scenes.plain, Reason.WRONG_STATE, "Instance.role", named="hello.instance.role"),
    *works(scenes.plain, "Hello.decode_name", "Hello.transports"),
    *refused(scenes.with_logprobs, Reason.FEATURE, "Hello.features", named="sampling.logprobs"),
    *refused(scenes.with_logprobs, Reason.FEATURE, "Welcome.features", named="sampling.logprobs"),
    *refused(scenes.plain, Reason.WRONG_STATE, "Welcome.instance", named="welcome.instance"),
    *refused(scenes.plain, Reason.WRONG_STATE, "Welcome.session_id", named="welcome.session_id"),
    *refused(scenes.plain, Reason.LAYOUT_MISMATCH, "Welcome.layout", named="model"),
    *works(scenes.plain, "Welcome.transport", "Welcome.shards", "Welcome.lease", "Welcome.grace"),
    *works(scenes.plain, "Welcome.heartbeat", "Welcome.max_model_len", "Welcome.kv_progress"),
    *works(scenes.plain, "Welcome.first_token", "Welcome.attach", "Welcome.tombstone"),
    # Canonical.
    *works(scenes.plain, "Welcome.kv_format", "AllocateResponse.kv_format"),
    *works(scenes.plain, "TransferOpen.kv_format"),
    *works(scenes.slow, "Welcome.heartbeat", "Welcome.lease"),
    *works(scenes.beating, "SessionRequest.heartbeat", "SessionResponse.heartbeat_ack"),
    *works(scenes.beating, "Heartbeat.sequence", "HeartbeatAck.sequence", "SessionResponse.load"),
    *works(scenes.beating, "Load.free_blocks", "Load.total_blocks"),
    *refused(scenes.slow, Reason.LEASE_EXPIRED, "Heartbeat.grant_ids", named="lease"),
    *works(scenes.drained, "SessionResponse.drain", "Drain.deadline"),
    *works(scenes.p_leaves, "SessionRequest.goodbye", "Goodbye.reason"),
    *works(scenes.d_leaves, "SessionResponse.goodbye", "Goodbye.reason"),
    # The layout.
    *refused(scenes.plain, Reason.LAYOUT_MISMATCH, "KvLayout.model", "KvLayout.positions"),
    *refused(scenes.plain, Reason.LAYOUT_MISMATCH, "KvLayout.block_size", "KvLayout.groups"),
    *refused(scenes.plain, Reason.LAYOUT_MISMATCH, "KvGroup.layers", "KvGroup.planes"),
    *refused(scenes.plain, Reason.LAYOUT_MISMATCH, "Plane.dtype", "Plane.heads", "Plane.head_dim"),
    *refused(scenes.plain, Reason.FEATURE, "Plane.kind", named="planes[0].kind"),
    *works(scenes.plain, "KvLayout.format", "KvGroup.kind", "Shard.tp_size"),
    # The grant.
    # To P a D that does not know its session is one that has lost it.
    *refused(scenes.plain, Reason.DECODE_LOST, "AllocateRequest.session_id", named="session"),
    *refused(scenes.plain, Reason.BAD_REQUEST, "AllocateRequest.ref"),
    *refused(scenes.plain, Reason.BAD_REQUEST, "AllocateRequest.prompt_tokens"),
    *refused(scenes.plain, Reason.BAD_REQUEST, "AllocateRequest.max_new_tokens"),
    *refused(scenes.plain, Reason.BAD_REQUEST, "AllocateRequest.prompt_digest"),
    *refused(scenes.plain, Reason.BAD_REQUEST, "AllocateRequest.sampling"),
    *works(scenes.plain, "AllocateRequest.max_wait", "AllocateRequest.budget"),
    *works(scenes.plain, "AllocateRequest.request_id"),
    # What was reused: all is wanted where no block is named, and all is computed.
    *works(scenes.again, "AllocateRequest.block_hashes", "AllocateResponse.cached_tokens"),
    *refused(scenes.again, Reason.BAD_REQUEST, "BlockHash.hash", named="block_hashes"),
    *refused(scenes.again, Reason.WRONG_STATE, "BlockRange.start", named="wanted"),
    *refused(
        scenes.again,
        Reason.HANDOFF_MISMATCH,
        "AllocateRequest.scope",
        "RequestScope.cache_salt",
        named="scope.cache_salt",
    ),
    *refused(scenes.plain, Reason.WRONG_STATE, "AllocateRequest.kv_needed", named="shards"),
    *refused(scenes.plain, Reason.BAD_REQUEST, "TransferRef.transfer_id", "TransferRef.attempt"),
    *refused(scenes.plain, Reason.STALE_EPOCH, "TransferRef.decode_epoch", named="0"),
    *refused(scenes.plain, Reason.WRONG_STATE, "AllocateResponse.grant_id"),
    *refused(scenes.plain, Reason.WRONG_STATE, "AllocateResponse.wanted", named="have not come"),
    *refused(scenes.plain, Reason.WRONG_STATE, "AllocateResponse.shards", "Shard.endpoint"),
    *refused(scenes.plain, Reason.WRONG_STATE, "BlockRange.count", named="wanted blocks"),
    *works(scenes.plain, "AllocateResponse.transport", "AllocateResponse.lease"),
    # The sampling: it differs from that of the client's leg.
    *refused(scenes.sampled, Reason.BAD_REQUEST, "SamplingParams.max_tokens"),
    *refused(
        scenes.sampled,
        Reason.HANDOFF_MISMATCH,
        *(
            f"SamplingParams.{name}"
            for name in ("min_tokens", "temperature", "top_p", "top_k", "seed")
        ),
        *(f"SamplingParams.{name}" for name in ("stop", "stop_token_ids", "ignore_eos")),
        named="sampling",
    ),
    *refused(
        scenes.with_logprobs, Reason.HANDOFF_MISMATCH, "SamplingParams.logprobs", named="sampling"
    ),
    *refused(
        scenes.with_features,
        Reason.HANDOFF_MISMATCH,
        *(f"SamplingParams.{name}" for name in FEATURES if name != "logprobs"),
        named="sampling",
    ),
    *refused(
        scenes.with_features,
        Reason.BAD_REQUEST,
        "StructuredOutput.regex",
        named="structured_output",
    ),
    # The KV.
    *refused(scenes.plain, Reason.WRONG_STATE, "TransferRequest.open"),
    *refused(scenes.plain, Reason.WRONG_STATE, "TransferRequest.chunk", "TransferRequest.end"),
    *refused(scenes.plain, Reason.DECODE_LOST, "TransferOpen.session_id", named="transfer"),
    *refused(scenes.plain, Reason.WRONG_STATE, "TransferOpen.ref", named="open.ref"),
    *refused(scenes.plain, Reason.WRONG_STATE, "TransferOpen.grant_id", named="open.grant_id"),
    *works(scenes.plain, "TransferOpen.transport"),
    *refused(
        scenes.in_pieces,
        Reason.WRONG_STATE,
        *(f"KvChunk.{name}" for name in ("layer_start", "layer_count")),
        *(f"KvChunk.{name}" for name in ("block_start", "block_count")),
        named="refused the KV",
    ),
    *refused(scenes.plain, Reason.KV_CORRUPT, "KvChunk.crc32c", named="checksum"),
    *refused(scenes.plain, Reason.WRONG_STATE, "KvChunk.payload"),
    *refused(
        scenes.plain, Reason.WRONG_STATE, "TransferEnd.chunks", "TransferEnd.bytes", named="end:"
    ),
    *refused(scenes.plain, Reason.DECODE_LOST, "TransferResponse.opened", named="transfer"),
    *works(scenes.in_pieces, "TransferResponse.ack", "TransferAck.ranges"),
    *works(scenes.in_pieces, "TransferAck.accepted_bytes", "TransferOpened.window_bytes"),
    *works(scenes.reopened, "TransferOpened.verified", "KvRange.layer_start"),
    *works(scenes.reopened, "KvRange.layer_count", "KvRange.block_count"),
    # P takes what D has said it has for sent; D finds what is missing at the end.
    Case("KvRange.block_start", scenes.reopened, Reason.WRONG_STATE, None, "have not come", True),
    *works(scenes.plain, "TransferCompleted.chunks", "TransferCompleted.bytes"),
    # What D has it has said, but not that it has everything: P cannot know.
    Case("TransferResponse.completed", scenes.plain, Reason.RELEASED, RIGHT),
    # The first token.
    *refused(scenes.plain, Reason.NO_SESSION, "SendFirstTokenRequest.session_id", named="session"),
    *refused(scenes.plain, Reason.WRONG_STATE, "SendFirstTokenRequest.ref"),
    *refused(scenes.plain, Reason.WRONG_STATE, "SendFirstTokenRequest.grant_id", named="no grant"),
    *refused(scenes.plain, Reason.WRONG_STATE, "SendFirstTokenRequest.tokens"),
    *works(scenes.plain, "SendFirstTokenRequest.computed_tokens"),
    *refused(scenes.one_token, Reason.WRONG_STATE, "FirstToken.finish_reason"),
    *refused(scenes.with_logprobs, Reason.WRONG_STATE, "FirstToken.logprobs"),
    *refused(scenes.with_logprobs, Reason.WRONG_STATE, "FirstToken.token_id", named="chosen"),
    *refused(scenes.with_logprobs, Reason.WRONG_STATE, "PositionLogprobs.chosen"),
    *refused(scenes.with_logprobs, Reason.WRONG_STATE, "PositionLogprobs.top"),
    *refused(scenes.with_logprobs, Reason.WRONG_STATE, "TokenLogprob.token_id", named="chosen"),
    # D goes on, for to it the token was handed over; P does not know that.
    Case("SendFirstTokenResponse.state", scenes.one_token, Reason.WRONG_STATE, RIGHT, "state 0"),
    # Giving back, and hearing of it.
    *(
        replace(_GONE, field=field)
        for field in ("SessionResponse.transfer_ended", "TransferEnded.ref", "TransferEnded.state")
    ),
    replace(_GONE, field="TransferEnded.status", prefill=Reason.RELEASED),
    *(
        replace(_LEAVES, field=field)
        for field in ("ReleaseRequest.writes_stopped", "ReleaseResponse.state")
    ),
    replace(_LEAVES, field="ReleaseRequest.cause", client=Reason.RELEASED),
    replace(_LEAVES, field="ReleaseRequest.session_id", client=Reason.LEASE_EXPIRED),
    replace(_LEAVES, field="ReleaseRequest.ref", client=Reason.LEASE_EXPIRED),
]

_RESERVED = "reserved in this version"
_ONE_SHARD = "there is one shard, which holds everything"
_ZERO = "the first of its kind, and there is one"

_D_WRITES = "with INLINE D does the writing"

NOT_SENT = {
    "Hello.shards": _ONE_SHARD,
    "Hello.hash_algorithm": "there is one, which empty means",
    "Welcome.grant_needs_client": _RESERVED,
    "Welcome.first_token_by_decode": _RESERVED,
    "HeartbeatAck.unknown_grant_ids": "D says that a transfer has ended before it is asked",
    "Load.queued_tokens": "nothing waits in these scenes, and P can do without its load",
    "Load.queued_requests": "nothing waits in these scenes, and P can do without its load",
    "Load.decoding": "not known after so few requests, and P can do without",
    "Load.decoding_each": "not known after so few requests, and P can do without",
    "Load.decoding_requests": "sent later than these scenes last, and P can do without its load",
    "KvGroup.window": _RESERVED,
    **{
        f"Shard.{kind}_{what}": _ONE_SHARD
        for kind in ("tp", "pp", "cp", "dp")
        for what in ("rank", "size")
        if (kind, what) != ("tp", "size")
    },
    **{
        f"Shard.{kind}_{what}": _ONE_SHARD
        for kind in ("layer", "head")
        for what in ("start", "count")
    },
    "Shard.transport_metadata": "empty for INLINE",
    **{f"SamplingParams.{name}": _RESERVED for name in ("prompt_logprobs",)},
    "SamplingParams.n": "the router's: each choice is a transfer of its own",
    "StructuredOutput.json_schema": "the other kind of grammar, regex, is sent",
    **{
        f"RequestScope.{name}": _RESERVED
        for name in (
            "model",
            "adapter",
            "media_hashes",
            "tenant",
            "priority",
            "siblings",
            "draft_token_ids",
            "direction",
        )
    },
    "FirstToken.sibling": _RESERVED,
    "TransferOpen.sender": _ONE_SHARD,
    "TransferOpen.sends": _ONE_SHARD,
    **{f"KvPart.{n}_{what}": _ONE_SHARD for n in ("layer", "head") for what in ("start", "count")},
    "KvChunk.head_start": _ONE_SHARD,
    "KvChunk.head_count": _ONE_SHARD,
    "TransferOpen.shard_index": _ZERO,
    "KvChunk.group": _ZERO,
    "KvRange.group": _ZERO,
    "TransferOpened.target": _D_WRITES,
    "TransferOpened.audit": _D_WRITES,
    "KvChunk.descriptor": _D_WRITES,
    "MemoryDescriptor.kind": _D_WRITES,
    "MemoryDescriptor.device": _D_WRITES,
    "MemoryDescriptor.handle": _D_WRITES,
}
"""Fields that no peer of these scenes sets, and why."""

ZERO_IS_A_VALUE = {
    "FirstToken.token_id": "token 0",
    "TokenLogprob.logprob": "certainty",
}
"""Fields without a trace of having been left out: what is then meant."""

FUTURE = [
    *refused(scenes.plain, Reason.LAYOUT_MISMATCH, "Hello.transports", named=str(UNKNOWN_VALUE)),
    *refused(scenes.plain, Reason.WRONG_STATE, "Instance.role", named="hello.instance.role"),
    *refused(scenes.plain, Reason.FEATURE, "KvGroup.kind", "Plane.kind", named=str(UNKNOWN_VALUE)),
    *refused(scenes.plain, Reason.LAYOUT_MISMATCH, "Welcome.transport", named=str(UNKNOWN_VALUE)),
    *refused(scenes.plain, Reason.FEATURE, "TransferOpen.transport", named=str(UNKNOWN_VALUE)),
    *refused(
        scenes.plain, Reason.WRONG_STATE, "AllocateResponse.transport", named=str(UNKNOWN_VALUE)
    ),
    *refused(
        scenes.plain, Reason.WRONG_STATE, "FirstToken.finish_reason", named=str(UNKNOWN_VALUE)
    ),
    Case(
        "SendFirstTokenResponse.state",
        scenes.one_token,
        Reason.WRONG_STATE,
        RIGHT,
        f"state {UNKNOWN_VALUE}",
    ),
    replace(_GONE, field="TransferEnded.state"),
    replace(_LEAVES, field="ReleaseResponse.state"),
]
"""The same for enum fields with a value that nobody knows."""
NEVER_AN_ENUM = {"RequestScope.direction": _RESERVED, "MemoryDescriptor.kind": _D_WRITES}
"""Enum fields whose message is not sent."""
