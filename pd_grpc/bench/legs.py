"""One request of the benchmark, as each of the three calls carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.messages import duration, prompt_digest
from pd_grpc.v1 import decode_pb2, inference_pb2, prefill_pb2, sampling_pb2, types_pb2

_FIRST_ID = 1000
_IDS = 30_000


@dataclass(frozen=True)
class BenchRequest:
    """A prompt of `prompt` tokens, to be answered with exactly `output`, by one of `decodes`
    (name and control endpoint) in that order."""

    transfer_id: str
    prompt: int
    output: int
    decodes: Sequence[tuple[str, str]]

    @property
    def token_ids(self) -> list[int]:
        """The prompt: no two requests begin alike, so that no cache of prefixes helps."""
        own = hash_of(self.transfer_id)
        first, second = _FIRST_ID + own % _IDS, _FIRST_ID + own // _IDS % _IDS
        rest = [*range(_FIRST_ID, _FIRST_ID + min(self.prompt, _IDS))]
        rounds = -(-self.prompt // _IDS)
        return [first, second, *rest * rounds][: self.prompt]


def hash_of(text: str) -> int:
    """The same in every process, unlike Python's own."""
    value = 0
    for byte in text.encode():
        value = (value * 31 + byte) % (1 << 61)
    return value


def _sampling(request: BenchRequest) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        max_tokens=request.output, temperature=0.0, seed=1, ignore_eos=True
    )


def _ref(request: BenchRequest, decode_epoch: int = 0) -> types_pb2.TransferRef:
    return types_pb2.TransferRef(
        transfer_id=request.transfer_id, attempt=1, decode_epoch=decode_epoch
    )


def prefill_request(request: BenchRequest) -> prefill_pb2.PrefillRequest:
    """For P."""
    return prefill_pb2.PrefillRequest(
        ref=_ref(request),
        request_id=request.transfer_id,
        token_ids=request.token_ids,
        sampling=_sampling(request),
        decodes=[
            prefill_pb2.DecodeTarget(name=name, endpoint=endpoint)
            for name, endpoint in request.decodes
        ],
    )


def generate_request(request: BenchRequest, decode_name: str) -> inference_pb2.GenerateRequest:
    """For D; with the empty name for the router, which makes both legs itself."""
    message = inference_pb2.GenerateRequest(
        request_id=request.transfer_id,
        token_ids=inference_pb2.TokenIds(ids=request.token_ids),
        sampling=_sampling(request),
    )
    if decode_name:
        message.handoff.ref.CopyFrom(_ref(request))
        message.handoff.decode_name = decode_name
    return message


def allocate_request(
    request: BenchRequest, session_id: str, decode_epoch: int, config: PrefillConfig
) -> decode_pb2.AllocateRequest:
    """As P asks for it."""
    budget_s = config.request_budget_s
    return decode_pb2.AllocateRequest(
        session_id=session_id,
        ref=_ref(request, decode_epoch),
        prompt_tokens=request.prompt,
        max_new_tokens=request.output,
        prompt_digest=prompt_digest(request.token_ids),
        sampling=_sampling(request),
        max_wait=duration(budget_s),
        budget=duration(budget_s),
        kv_needed=request.output > 1,
        request_id=request.transfer_id,
    )
