"""The torch engine with the packaged model."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.sampling import Sampling
from tests.engine.torch_models import Request, decode, prefill

pytestmark = [pytest.mark.longest, pytest.mark.usefixtures("one_thread")]


def chat(engine: TorchEngine, question: str, sampling: Sampling) -> Request:
    prompt = engine.tokenizer().encode_chat([("user", question)])
    request = Request(prompt, range(20), sampling)
    prefill(engine, [request], chunk_tokens=512)
    while request.tokens[-1] not in engine.eos_token_ids:
        assert len(request.output) < sampling.max_tokens
        request.output += engine.decode([request.slot()])
    return request


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france(smollm2: TorchEngine) -> None:
    sampling = Sampling(max_tokens=40, temperature=0.0)

    request = chat(smollm2, "What is the capital of France?", sampling)

    assert smollm2.tokenizer().decode(request.tokens) == "The capital of France is Paris."
    assert request.tokens[-1] == 2


@pytest.mark.model
def test_smollm2_says_the_same_alone_and_in_a_batch(smollm2: TorchEngine) -> None:
    encode = smollm2.tokenizer().encode
    texts = ["The sea", "Once upon a time, there was a", "def add(a, b):\n", "1, 2, 3, 4,"] * 2
    samplings = [
        Sampling(max_tokens=8, temperature=0.0 if i < 4 else 0.8, seed=i) for i in range(8)
    ]

    def requests() -> list[Request]:
        return [
            Request(encode(text), range(4 * i, 4 * i + 4), sampling)
            for i, (text, sampling) in enumerate(zip(texts, samplings, strict=True))
        ]

    together, alone = requests(), requests()
    prefill(smollm2, together)
    decode(smollm2, together)
    for request in alone:
        prefill(smollm2, [request])
        decode(smollm2, [request])

    assert [r.tokens for r in alone] == [r.tokens for r in together]
