"""What P asks of a D for a request: whether it need be asked at all, and the Allocate."""

from __future__ import annotations

from pd_grpc.prefill.sessions import DecodeSession
from pd_grpc.prefill.states import PrefillRecord
from pd_grpc.protocol.faults import Fault, Reason, not_meant
from pd_grpc.protocol.messages import duration, lacking_feature
from pd_grpc.v1 import decode_pb2


def objection(record: PrefillRecord, session: DecodeSession) -> Fault | None:
    """Why this D need not even be asked; None when it may have the request."""
    name = session.instance.name
    if record.target.name not in ("", name):
        text = f"{session.endpoint} is {name}, not {record.target.name}"
        return not_meant(Reason.WRONG_INSTANCE, text, record.target.name, name)
    meant = record.request.ref.decode_epoch
    if record.choice == 0 and meant not in (0, session.instance.epoch):
        text = f"the transfer means another process of {name}"
        return not_meant(Reason.STALE_EPOCH, text, meant, session.instance.epoch)
    if session.draining:
        return Fault(Reason.DRAINING, f"decode instance {name} is draining")
    feature = lacking_feature(record.request.sampling, session.welcome.features)
    if feature is not None:
        return Fault(Reason.FEATURE, f"{feature} is not supported by {name}", {"feature": feature})
    tokens, most = record.most_tokens, session.welcome.max_model_len
    if most and tokens > most:
        return Fault(
            Reason.TOO_LARGE,
            f"prompt plus max_tokens needs {tokens} tokens; {name} takes at most {most}",
            {"needed": str(tokens), "total": str(most), "unit": "tokens"},
        )
    return None


def allocate_request(
    record: PrefillRecord,
    session: DecodeSession,
    max_wait_s: float,
    budget_s: float,
    block_size: int,
) -> decode_pb2.AllocateRequest:
    """Asks the D of a session for the blocks of a request. `max_wait_s` is how long it may wait for
    them, `budget_s` what is left of the request's time, both in seconds; `block_size` in tokens."""
    request = record.request
    return decode_pb2.AllocateRequest(
        session_id=session.session_id,
        ref=record.key.ref(session.instance.epoch),
        prompt_tokens=len(record.tokens),
        max_new_tokens=record.max_new_tokens,
        prompt_digest=record.prompt_digest,
        sampling=request.sampling,
        max_wait=duration(max_wait_s),
        budget=duration(budget_s),
        kv_needed=record.kv_needed,
        scope=request.scope if request.HasField("scope") else None,
        request_id=request.request_id,
        block_hashes=_names(record, block_size),
    )


def _names(record: PrefillRecord, block_size: int) -> list[decode_pb2.BlockHash]:
    """Of all whole blocks, where D may make use of them."""
    if not record.kv_needed:
        return []
    names = record.chain.names(record.tokens, len(record.tokens) // block_size)
    return [decode_pb2.BlockHash(hash=name) for name in names]
