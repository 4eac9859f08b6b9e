"""An engine's model as GetModelInfo tells it."""

from __future__ import annotations

from pd_grpc.engine.base import Engine
from pd_grpc.protocol.messages import layout_to_proto
from pd_grpc.v1 import inference_pb2


def model_info(engine: Engine) -> inference_pb2.GetModelInfoResponse:
    """What is served."""
    return inference_pb2.GetModelInfoResponse(
        model=engine.name,
        tokenizer=engine.name,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        layout=layout_to_proto(engine.layout),
        features=sorted(engine.features),
    )
