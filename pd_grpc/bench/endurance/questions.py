"""What the streams of an unplug run ask, and what is right."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_grpc.bench.endurance.asking import How, Right, ask, generate_request
from pd_grpc.bench.endurance.fleet import Fleet
from pd_grpc.bench.processes import WorkerLost
from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.load import load_tokenizer
from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.engine.text import Detokenizer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import EngineConfig, Sizes, Timeouts
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2_grpc

_VOCAB = 600
_BUDGET_S = 300.0
_ROUTER = {"retry_wait_s": 8.0}
"""Beside its defaults, the heartbeat among them: a kill closes connections, and needs none to be
noticed. A machine whose cores are all busy may take a while to bring an instance back."""


@dataclass(frozen=True)
class Question:
    """A prompt with its sampling."""

    prompt: tuple[int, ...]
    sampling: Sampling


class Questions(ABC):
    """Of one engine. `settings` are of P and D, `prefill_settings` and `decode_settings` of one of
    them alone, `router_settings` of the router."""

    settings: Mapping[str, Any]
    prefill_settings: Mapping[str, Any]
    decode_settings: Mapping[str, Any]
    router_settings: Mapping[str, Any]

    async def learn(self, fleet: Fleet) -> None:  # noqa: B027 - not all have to
        """Find out what is right, before anything goes wrong."""

    @abstractmethod
    def question(self, stream: int, number: int) -> Question:
        """The one that a stream asks as its `number`th."""

    @abstractmethod
    def right(self, question: Question) -> Right:
        """Its right answer."""


def with_text(tokenizer: Tokenizer, question: Question, token_ids: list[int]) -> Right:
    """These tokens as an answer."""
    text = Detokenizer(tokenizer)
    return Right(token_ids, text.push(token_ids) + text.finish(), len(question.prompt))


class SimQuestions(Questions):
    """Random prompts for the sim engine, whose answers follow from its rule; `decode_scale` is how
    slow D is."""

    def __init__(self, seed: int, decode_scale: float) -> None:
        self._seed = seed
        self._tokenizer = load_tokenizer("sim", "", _VOCAB)
        self.settings = {
            "engine": "sim",
            "sim_vocab": _VOCAB,
            "num_blocks": 4096,
            "max_batch": 256,
            "request_budget_s": _BUDGET_S,
        }
        self.prefill_settings = {"sim_time_scale": 1.0}
        self.decode_settings = {"sim_time_scale": decode_scale}
        self.router_settings = {"engine": "sim", "sim_vocab": _VOCAB, **_ROUTER}
        self._config = EngineConfig(engine="sim", sim_vocab=_VOCAB)

    def question(self, stream: int, number: int) -> Question:
        """Answers of 40 to 160 tokens."""
        draw = random.Random(f"{self._seed}/{stream}/{number}")
        prompt = tuple(draw.randrange(3, _VOCAB) for _ in range(draw.randint(16, 96)))
        sampling = Sampling(
            max_tokens=draw.randint(40, 160),
            temperature=draw.choice((0.0, 0.8)),
            seed=draw.randrange(2**63),
            ignore_eos=True,
        )
        return Question(prompt, sampling)

    def right(self, question: Question) -> Right:
        """By the rule."""
        token_ids = sim_answer(question.prompt, question.sampling, self._config)
        return with_text(self._tokenizer, question, token_ids)


PROMPTS = (
    "What is the capital of France?",
    "Explain photosynthesis in two sentences.",
    "Write a haiku about the sea.",
    "Why is the sky blue?",
    "Name three rivers in Africa and what grows there.",
    "How does a bicycle stay upright?",
    "Tell a short story about a lost key.",
    "What would you pack for a week in the mountains?",
)
_TOKENS = 48


class ModelQuestions(Questions):
    """Questions to the packaged SmolLM2 in fp32; right is what a D answers that is asked for each
    alone and prefills it itself."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer("torch", "smollm2")
        self._answers: dict[Question, list[int]] = {}
        self.settings = {
            "engine": "torch",
            "model": "smollm2",
            "dtype": "float32",
            "threads": 1,
            "num_blocks": 256,
            "chunk_tokens": 128,
            "request_budget_s": _BUDGET_S,
        }
        self.prefill_settings = {}
        self.decode_settings = {}
        self.router_settings = {"engine": "torch", "model": "smollm2", **_ROUTER}
        self._all = [
            Question(tuple(self._tokenizer.encode_chat([("user", text)])), sampling)
            for i, text in enumerate(PROMPTS)
            for sampling in (
                Sampling(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True),
                Sampling(max_tokens=_TOKENS, temperature=0.8, seed=1000 + i, ignore_eos=True),
            )
        ]

    async def learn(self, fleet: Fleet) -> None:
        """Ask every D a part. WorkerLost when one does not answer."""
        decodes = [unit.process.endpoint for unit in fleet.units.values() if unit.role == "decode"]
        parts = [self._all[i :: len(decodes)] for i in range(len(decodes))]
        await asyncio.gather(*map(self._ask_alone, decodes, parts))

    async def _ask_alone(self, endpoint: str, questions: Sequence[Question]) -> None:
        """One after another, without a hand-over."""
        async with rpc.aio_channel(endpoint, Timeouts(), Sizes()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for question in questions:
                message = generate_request("", question.prompt, "", question.sampling)
                reply = await ask(stub, message, _BUDGET_S)
                if reply.how is not How.COMPLETE:
                    raise WorkerLost(f"the D at {endpoint} does not answer: {reply.fault}")
                self._answers[question] = reply.token_ids

    def question(self, stream: int, number: int) -> Question:
        """Each stream goes round the list from a place of its own."""
        return self._all[(2 * stream + number) % len(self._all)]

    def right(self, question: Question) -> Right:
        """As it was learnt."""
        return with_text(self._tokenizer, question, self._answers[question])
