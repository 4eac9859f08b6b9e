"""Streaming text: the same text as decoding all tokens at once, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.engine.text import Detokenizer

MULTILINGUAL = [
    "The quick brown fox.",
    "Grüße aus Köln, naïve façade — “quoted”…",
    "日本語のテキストと漢字、한국어 문장, Ελληνικά, русский текст.",
    "مرحبا بالعالم שלום עולם हिन्दी தமிழ் ไทย",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🤷🏽‍♀️ shrug, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "a  b   c\n\n\tindent\r\n  trailing  ",
    "replacement \ufffd inside and at the end \ufffd",
    "",
]

SIM = SimTokenizer(1000)


def streamed(tokenizer: Tokenizer, token_ids: Sequence[int], steps: Sequence[int] = ()) -> str:
    """The text of all pieces, pushed one by one or in runs of `steps`."""
    detokenizer = Detokenizer(tokenizer)
    pieces = []
    at = 0
    for size in [*steps, *[1] * len(token_ids)]:
        pieces.append(detokenizer.push(token_ids[at : at + size]))
        at += size
    return "".join([*pieces, detokenizer.finish()])


@pytest.mark.model
@pytest.mark.parametrize("text", MULTILINGUAL)
def test_streaming_text_of_any_script_gives_that_text(
    smollm2_tokenizer: Tokenizer, text: str
) -> None:
    token_ids = smollm2_tokenizer.encode(text)

    assert streamed(smollm2_tokenizer, token_ids) == smollm2_tokenizer.decode(token_ids) == text


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 280)), max_size=40),
    steps=st.lists(st.integers(1, 5), max_size=8),
)
def test_streaming_random_tokens_gives_what_decoding_them_at_once_gives(
    smollm2_tokenizer: Tokenizer, token_ids: list[int], steps: list[int]
) -> None:
    assert streamed(smollm2_tokenizer, token_ids, steps) == smollm2_tokenizer.decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 6), max_size=10))
def test_streaming_the_bytes_of_any_text_gives_that_text(text: str, cuts: list[int]) -> None:
    assert streamed(SIM, SIM.encode(text), cuts) == text


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, 400), max_size=40))
def test_streaming_bytes_that_are_no_text_gives_what_decoding_them_at_once_gives(
    token_ids: list[int],
) -> None:
    assert streamed(SIM, token_ids) == SIM.decode(token_ids)


def test_half_a_character_is_held_back_and_what_is_before_it_is_not() -> None:
    detokenizer = Detokenizer(SIM)

    shown = [detokenizer.push([token_id]) for token_id in SIM.encode("a€b")]

    assert shown == ["a", "", "", "€", "b"]


def test_half_a_character_at_the_end_is_given_as_a_replacement_character() -> None:
    detokenizer = Detokenizer(SIM)
    shown = detokenizer.push(SIM.encode("a€")[:-1])

    assert (shown, detokenizer.finish()) == ("a", "\ufffd")


def test_nothing_of_a_stop_string_is_ever_shown() -> None:
    detokenizer = Detokenizer(SIM, stop=["STOP", "END"])

    shown = [detokenizer.push([token_id]) for token_id in SIM.encode("ab STENDING")]

    assert "".join(shown) == "ab ST"
    assert detokenizer.stopped
    assert detokenizer.finish() == ""
    assert detokenizer.text == "ab ST"


def test_what_only_began_like_a_stop_string_is_shown_after_all() -> None:
    detokenizer = Detokenizer(SIM, stop=["STOP"])
    shown = detokenizer.push(SIM.encode("a ST"))

    assert (shown, detokenizer.push(SIM.encode("A")), detokenizer.finish()) == ("a ", "STA", "")


def test_the_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    detokenizer = Detokenizer(SIM, stop=["STOP"])
    shown = detokenizer.push(SIM.encode("a STO"))

    assert (shown, detokenizer.finish(), detokenizer.stopped) == ("a ", "STO", False)


def test_the_stop_string_that_comes_first_in_the_text_cuts_it() -> None:
    detokenizer = Detokenizer(SIM, stop=["c", "bc"])

    assert detokenizer.push(SIM.encode("abcd")) == "a"


def test_a_stop_string_is_found_although_half_a_character_follows_it_in_the_same_token() -> None:
    class Pairs:
        """Two bytes to a token."""

        def encode(self, text: str) -> list[int]:
            raise NotImplementedError

        def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
            raise NotImplementedError

        def decode(self, token_ids: Sequence[int]) -> str:
            data = b"".join(i.to_bytes(2, "big") for i in token_ids)
            return data.decode(errors="replace")

    detokenizer = Detokenizer(Pairs(), stop=["END"])

    detokenizer.push([int.from_bytes(b"EN", "big"), int.from_bytes(b"D\xe2", "big")])

    assert detokenizer.stopped


def test_a_stop_string_before_min_tokens_does_not_stop_and_is_shown() -> None:
    detokenizer = Detokenizer(SIM, stop=["b"], min_tokens=3)

    assert detokenizer.push(SIM.encode("abc")) == "abc"
    assert detokenizer.push(SIM.encode("db")) == "d"
    assert detokenizer.stopped


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abE", max_size=30),
    stop=st.lists(st.text("abE", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_shown_ends_before_the_first_stop_string_to_be_complete(
    text: str, stop: list[str]
) -> None:
    detokenizer = Detokenizer(SIM, stop=stop)
    shown = "".join([detokenizer.push([i]) for i in SIM.encode(text)] + [detokenizer.finish()])

    complete = [i for i in range(1, len(text) + 1) if any(text[:i].endswith(s) for s in stop)]
    expected = text
    if complete:
        longest = max(len(s) for s in stop if text[: complete[0]].endswith(s))
        expected = text[: complete[0] - longest]
    assert (shown, detokenizer.stopped) == (expected, bool(complete))
