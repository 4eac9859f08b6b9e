"""When an answer ends."""

from __future__ import annotations

import pytest

from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.engine.stopping import Finish, StopRule
from pd_grpc.protocol.sampling import Sampling

SIM = SimTokenizer(1000)
EOS = 2


def test_an_answer_ends_with_length_at_max_tokens() -> None:
    rule = StopRule(Sampling(max_tokens=3), {EOS}, None)

    assert [rule.push(9), rule.push(9), rule.push(9)] == [None, None, Finish.LENGTH]


def test_end_of_sequence_ends_it_with_stop_even_as_the_last_token_allowed() -> None:
    rule = StopRule(Sampling(max_tokens=2), {EOS}, None)

    assert [rule.push(9), rule.push(EOS)] == [None, Finish.STOP]


def test_with_ignore_eos_only_stop_token_ids_end_it() -> None:
    rule = StopRule(Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=(7,)), {EOS}, None)

    assert [rule.push(EOS), rule.push(7)] == [None, Finish.STOP]


def test_no_token_ends_it_before_min_tokens() -> None:
    rule = StopRule(Sampling(max_tokens=9, min_tokens=2, stop_token_ids=(7,)), {EOS}, None)

    assert [rule.push(7), rule.push(EOS)] == [None, Finish.STOP]


def test_a_stop_string_that_spans_tokens_ends_it_with_its_last_one() -> None:
    rule = StopRule(Sampling(max_tokens=9, stop=("bc",)), {EOS}, SIM)

    assert [rule.push(i) for i in SIM.encode("abc")] == [None, None, Finish.STOP]


def test_a_stop_string_may_begin_in_what_was_generated_before() -> None:
    rule = StopRule(Sampling(max_tokens=9, stop=("bc",)), {EOS}, SIM, SIM.encode("ab"))

    assert (rule.generated, rule.push(SIM.encode("c")[0])) == (2, Finish.STOP)


def test_what_was_generated_before_counts_for_max_and_min_tokens() -> None:
    sampling = Sampling(max_tokens=3, min_tokens=3)
    rule = StopRule(sampling, {EOS}, None, [9, EOS])

    assert (rule.generated, rule.push(EOS)) == (2, Finish.STOP)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        StopRule(Sampling(max_tokens=1, stop=("x",)), {EOS}, None)
