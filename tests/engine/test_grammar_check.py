"""What P and D ask of a grammar, while one of another request takes long."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from pd_grpc.engine import grammar_trial
from pd_grpc.engine.constraint import constraint_of
from pd_grpc.engine.grammar_check import GrammarCheck
from pd_grpc.engine.grammar_trial import Stopped, Trials
from pd_grpc.engine.hf_tokenizer import HfTokenizer
from pd_grpc.protocol.faults import Reason
from pd_grpc.v1 import sampling_pb2
from tests.engine.grammar_trials import HOSTILE, trials_under_way
from tests.engine.torch_models import VOCAB, byte_tokenizer
from tests.waiting import LIMIT_S, until


async def test_a_check_that_stops_ends_the_trial_under_way() -> None:
    check = GrammarCheck(constraint_of(HfTokenizer(byte_tokenizer()), VOCAB, frozenset([257])))
    first, second = (asyncio.create_task(check.look(HOSTILE)) for _ in range(2))
    await until(lambda: bool(trials_under_way()))
    (trial,) = trials_under_way()
    # Of itself it ends no more: it has no processor time to spend.
    trial.send_signal(signal.SIGSTOP)
    await check.stop()
    assert not psutil.pid_exists(trial.pid), "it lives on, or nobody has asked how it ended"
    for looked in await asyncio.gather(first, second):
        assert looked.grammar is None and looked.fault is not None
        assert looked.fault.reason is Reason.DRAINING, "the time for it was waited for"


async def test_an_answer_that_goes_on_waits_for_no_trial_of_another_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_trial, "WALL_S", 10 * LIMIT_S)
    tokenizer = HfTokenizer(byte_tokenizer())
    check = GrammarCheck(constraint_of(tokenizer, VOCAB, frozenset([257])))
    grammar = sampling_pb2.StructuredOutput(regex="abc+")
    begun = sampling_pb2.SamplingParams(max_tokens=8, structured_output=grammar)
    assert (await check.look(begun)).fault is None
    hostile = asyncio.create_task(check.look(HOSTILE))
    await until(lambda: bool(trials_under_way()))
    (trial,) = trials_under_way()
    # It is over when the check stops, and no sooner.
    trial.send_signal(signal.SIGSTOP)
    for output, refused in (("abcc", False), ("abx", True)):
        looked = await asyncio.wait_for(check.look(begun, tokenizer.encode(output)), LIMIT_S)
        assert (looked.fault is not None) == refused
    assert not hostile.done()
    await check.stop()
    await hostile


def test_what_has_stopped_tries_no_more() -> None:
    trials = Trials()
    trials.stop()
    with pytest.raises(Stopped):
        trials.try_grammar("")
    assert trials_under_way() == []
