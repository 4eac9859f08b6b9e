"""F17, F62: what P and D answer together, and what they count, is what one server answers alone."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol import rpc
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.faults import Code, Fault, Reason
from pd_grpc.protocol.messages import sampling_to_proto
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import inference_pb2, types_pb2
from tests.cluster import SIM, cluster
from tests.system.asking import Reply, ask, request

PROMPT = list(range(40, 90))
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=12, temperature=0.8, top_k=40, seed=11, ignore_eos=True)
CONFIG = DecodeConfig(**SIM)


def _stops() -> list[Sampling]:
    """Samplings whose limits meet the first token, which is P's, and the ones after it."""
    said = sim_answer(PROMPT, GREEDY, CONFIG)
    first, both = (SimTokenizer(CONFIG.sim_vocab).decode(said[:n]) for n in (1, 2))
    across = both[len(first) - 1 : len(first) + 1]
    return [
        Sampling(max_tokens=12, temperature=0.0, stop=(first,)),
        Sampling(max_tokens=12, temperature=0.0, stop=("never", across)),
        Sampling(max_tokens=12, temperature=0.0, stop=(first,), min_tokens=3),
        Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(said[0],)),
        Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(said[1],)),
        Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(said[0],), min_tokens=1),
        Sampling(max_tokens=12, temperature=0.0, stop_token_ids=tuple(said[:3]), min_tokens=2),
        Sampling(max_tokens=12, temperature=0.0, stop_token_ids=tuple(said[:3]), min_tokens=12),
        Sampling(max_tokens=1, temperature=0.0),
        SEEDED,
        Sampling(max_tokens=12, temperature=0.8, top_p=0.9, seed=12, min_tokens=5),
    ]


def _requests() -> list[inference_pb2.GenerateRequest]:
    """Samplings, prompts asked twice or going on from one another, and answers to be continued."""
    asked = [request(PROMPT, sampling) for sampling in _stops()]
    asked += [request(PROMPT, GREEDY), request(PROMPT, GREEDY)]
    said = sim_answer(PROMPT, GREEDY, CONFIG)
    asked.append(request(PROMPT + said, GREEDY))
    for given in (1, 5, 11):
        rest = request(PROMPT, GREEDY)
        rest.generated_token_ids.extend(said[:given])
        asked.append(rest)
    # Begun in a token that the client has, and complete in P's.
    stopped = request(PROMPT, _stops()[1])
    stopped.generated_token_ids.extend(said[:1])
    asked.append(stopped)
    return asked


async def _answers(aggregated: bool) -> list[Reply]:
    async with cluster(aggregated=aggregated) as servers, servers.client() as stub:
        return list(await asyncio.gather(*(ask(stub, each) for each in _requests())))


async def test_usage_and_answer_are_those_of_one_server() -> None:
    """F17, F62: tokens, text, finish reason and each figure of the usage."""
    apart, together = await _answers(aggregated=False), await _answers(aggregated=True)
    for asked, two, one in zip(_requests(), apart, together, strict=True):
        assert two.essence == one.essence, asked
        assert two.last.usage.prompt_tokens == len(asked.token_ids.ids)
        given = len(asked.generated_token_ids)
        assert two.last.usage.completion_tokens == given + len(two.token_ids)
    ends = [(len(two.token_ids), two.last.finish_reason) for two in (*apart[:2], apart[-1])]
    stop = types_pb2.FINISH_REASON_STOP
    assert ends == [(1, stop), (2, stop), (1, stop)], "the stop strings that P's token meets"


@pytest.mark.parametrize("aggregated", [False, True])
async def test_what_the_engine_has_not_is_refused_alike(aggregated: bool) -> None:
    """F62: the sim model has no probabilities to change, and penalties are never left out
    quietly."""
    async with cluster(aggregated=aggregated) as servers, servers.client() as stub:
        for field in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            message = request(PROMPT, GREEDY)
            params = sampling_to_proto(GREEDY)
            setattr(params, field, 1.5)
            message.sampling.CopyFrom(params)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await ask(stub, message)
            fault = rpc.read_error(raised.value)
            assert isinstance(fault, Fault)
            assert (fault.code, fault.reason) == (Code.UNIMPLEMENTED, Reason.FEATURE)
            assert fault.metadata["feature"] == f"sampling.{field}"
