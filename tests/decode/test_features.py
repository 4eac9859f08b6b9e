"""What D's engine can do reaches those who ask for it."""

from __future__ import annotations

from pd_grpc.engine.sim import SimEngine
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.messages import layout_to_proto
from pd_grpc.v1 import decode_pb2, sampling_pb2
from tests.decode.wire import fault_of, wire


class WithLogprobs(SimEngine):
    """Says that it has them."""

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.features = frozenset({"logprobs"})


async def test_a_session_has_the_features_that_both_sides_have() -> None:
    async with wire(WithLogprobs) as d:
        p = await d.prefill()
        assert p.welcome.features == []
        asked = sampling_pb2.SamplingParams(max_tokens=5, seed=7, logprobs=1)
        fault = await fault_of(p.allocate(d.request(), sampling=asked))
        assert fault.reason is Reason.FEATURE
        assert fault.metadata == {"feature": "sampling.logprobs"}
        again = p.decode.Session()
        hello = decode_pb2.Hello(
            instance=p.instance,
            layouts=[layout_to_proto(p.engine.layout)],
            features=["logprobs"],
        )
        await again.write(decode_pb2.SessionRequest(hello=hello))
        p.welcome = (await again.read()).welcome
        assert p.welcome.features == ["logprobs"]
        request = d.request()
        await p.allocate(request, sampling=asked)
        await p.release(request)
        again.cancel()
