"""F27: an answer that its first token ends is over at P, and KV moves only if it is needed."""

from __future__ import annotations

import itertools

import pytest

from pd_grpc.engine.sim_reference import sim_answer
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.v1 import types_pb2
from tests.prefill.cluster import Cluster, Request, request_to, running

EOS = 2
VOCAB = 300
"""So few that some seed soon draws the end of sequence."""
CONFIG = EngineConfig(engine="sim", block_size=4, sim_vocab=VOCAB)


def _answer(request: Request) -> list[int]:
    return sim_answer(request.tokens, sampling_from_proto(request.sampling), CONFIG)


def _request(endpoint: str, seed: int, max_tokens: int) -> Request:
    request = request_to(endpoint, seed=seed, max_tokens=max_tokens)
    request.tokens = [7 + n for n in range(18)]
    return request


async def test_max_tokens_1_moves_no_kv() -> None:
    """F27"""
    async with running() as cluster:
        p, d = await cluster.prefill(sim_vocab=VOCAB), await cluster.decode(sim_vocab=VOCAB)
        request = _request(d.endpoint, 1, max_tokens=1)
        await _needs_no_blocks(cluster, request, types_pb2.FINISH_REASON_LENGTH)
        assert not p.bulk._transfers, "no stream was opened"


@pytest.mark.parametrize("ignored", [False, True])
async def test_an_end_of_sequence_first_ends_the_answer_unless_it_is_ignored(ignored: bool) -> None:
    """F27"""
    async with running() as cluster:
        p, d = await cluster.prefill(sim_vocab=VOCAB), await cluster.decode(sim_vocab=VOCAB)
        requests = (_request(d.endpoint, seed, 6) for seed in itertools.count())
        request = next(r for r in requests if _answer(r)[0] == EOS)
        request.sampling.ignore_eos = ignored
        prefill, generate = await cluster.run(p, d, request)
        assert (prefill.fault, generate.fault) == (None, None)
        assert generate.tokens == _answer(request)
        assert generate.tokens[0] == EOS and (len(generate.tokens) == 6) == ignored
        stop, length = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
        assert generate.finish == (length if ignored else stop)


async def _needs_no_blocks(cluster: Cluster, request: Request, finish: int) -> None:
    """It is answered whole, though D has no block for anybody."""
    p, d = cluster.prefills[0], cluster.decodes[0]
    taken = d.pool.reserve(d.pool.free, owner="the test")
    prefill, generate = await cluster.run(p, d, request)
    taken.release()
    assert (prefill.fault, generate.fault) == (None, None)
    assert prefill.messages[-1].WhichOneof("event") == "handed_off"
    assert (generate.tokens, generate.finish) == (_answer(request), finish)
    assert len(generate.tokens) == generate.usage.completion_tokens == 1
