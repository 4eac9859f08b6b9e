"""Penalties and biases over whole answers: what transformers' own `generate` says with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from pd_grpc.engine.torch import TorchEngine
from pd_grpc.protocol.sampling import Sampling
from tests.engine.torch_models import (
    CONFIGS,
    VOCAB,
    Request,
    decode,
    eager_tokens,
    load_tiny,
    prefill,
    save_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 24
PROMPTS = [[(7 * i * i + n) % VOCAB for i in range(n)] for n in (5, 37, 70)]
CHANGES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -2.0, "presence_penalty": -1.0},
    {"logit_bias": ((11, 4.0), (12, 4.0), (200, -100.0))},
    {
        "repetition_penalty": 1.15,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.2,
        "logit_bias": ((33, 5.0), (34, -5.0)),
    },
]


class OfOutput(LogitsProcessor):
    """Frequency and presence over what follows the prompt."""

    def __init__(self, sampling: Sampling, prompt: int) -> None:
        self.sampling, self.prompt = sampling, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1])
        once = (counts > 0).to(scores.dtype)
        lost = counts * self.sampling.frequency_penalty + once * self.sampling.presence_penalty
        return scores - lost


def processors(sampling: Sampling, prompt: int) -> LogitsProcessorList:
    """Those of transformers that mean the same, in our order."""
    found: list[Any] = []
    if sampling.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[i], bias] for i, bias in sampling.logit_bias]))
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    found.append(OfOutput(sampling, prompt))
    return LogitsProcessorList(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), CONFIGS["llama"]())


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return load_tiny(folder, num_blocks=400)


def test_in_one_batch_each_answer_is_that_of_generate_with_the_same_penalties(
    folder: Path, engine: TorchEngine
) -> None:
    asked = [
        (prompt, Sampling(max_tokens=TOKENS, temperature=0.0, **changes))
        for prompt in PROMPTS
        for changes in CHANGES
    ]
    requests = [
        Request(prompt, range(12 * i, 12 * i + 12), sampling)
        for i, (prompt, sampling) in enumerate(asked)
    ]
    prefill(engine, requests)
    decode(engine, requests)

    said = [request.tokens for request in requests]
    assert said == [
        eager_tokens(folder, prompt, TOKENS, processors(sampling, len(prompt)))
        for prompt, sampling in asked
    ]
    unchanged = said[:: len(CHANGES)]
    for change in range(1, len(CHANGES)):
        assert said[change :: len(CHANGES)] != unchanged, "each change must matter"
