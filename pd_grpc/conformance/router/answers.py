"""What the kit's P and D say."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.conformance.router.instance import KitInstance
from pd_grpc.protocol.messages import duration
from pd_grpc.v1 import inference_pb2, prefill_pb2, types_pb2

P_TIMES_S = {"queue": 0.0001, "prepare": 0.0002, "allocate": 0.0001, "compute": 0.0003}
"""P's part of the timings; less than any answer takes."""


def queued() -> prefill_pb2.PrefillResponse:
    """P has the request."""
    return prefill_pb2.PrefillResponse(queued=prefill_pb2.Queued())


def progress(computed_tokens: int) -> prefill_pb2.PrefillResponse:
    """P has computed so much."""
    return prefill_pb2.PrefillResponse(
        progress=prefill_pb2.Progress(computed_tokens=computed_tokens)
    )


def placing(decode: KitInstance) -> prefill_pb2.PrefillResponse:
    """P turns to another D."""
    target = prefill_pb2.DecodeTarget(name=decode.name, endpoint=decode.endpoint)
    return prefill_pb2.PrefillResponse(placing=prefill_pb2.Placing(decode=target))


def handed_off(decode: KitInstance, prompt_tokens: int) -> prefill_pb2.PrefillResponse:
    """D has it."""
    return prefill_pb2.PrefillResponse(
        handed_off=prefill_pb2.HandedOff(
            decode=decode.instance,
            usage=types_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=1),
            timings=types_pb2.Timings(**{k: duration(v) for k, v in P_TIMES_S.items()}),
        )
    )


def tokens(ids: Sequence[int]) -> inference_pb2.GenerateResponse:
    """A piece of D's answer."""
    return inference_pb2.GenerateResponse(token_ids=ids)


def last(
    ids: Sequence[int],
    usage: types_pb2.Usage,
    decode: str,
    reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_LENGTH,
) -> inference_pb2.GenerateResponse:
    """D's last message."""
    return inference_pb2.GenerateResponse(
        token_ids=ids, finish_reason=reason, usage=usage, decode_instance=decode
    )
