"""The sim tokenizer: text there and back, and as it streams."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_grpc.engine.sim_tokenizer import BOS_ID, EOS_ID, FIRST_WORD_ID, PAD_ID, SimTokenizer
from pd_grpc.engine.text import Detokenizer

TOKENIZER = SimTokenizer(300)
ANY_IDS = st.lists(st.integers(0, 299), max_size=40)


@settings(deadline=None)
@given(st.text())
def test_text_comes_back_from_its_ids(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert all(2 < token_id < FIRST_WORD_ID for token_id in ids)


def test_special_ids_have_no_text_and_others_are_words() -> None:
    a, b = TOKENIZER.encode("ab")
    assert TOKENIZER.decode([BOS_ID, a, PAD_ID, 259, b, 299, EOS_ID]) == "a w259b w299"
    assert TOKENIZER.decode([]) == ""


def test_bytes_that_are_no_character_yet_decode_to_the_replacement_character() -> None:
    euro = TOKENIZER.encode("€")
    assert TOKENIZER.decode(euro[:1]) == "\ufffd"
    assert TOKENIZER.decode(euro[:2]) == "\ufffd"
    assert TOKENIZER.decode([*euro[:2], 259]) == "\ufffd w259"


@settings(deadline=None)
@given(ANY_IDS)
def test_streamed_text_is_the_text_of_all_ids(ids: list[int]) -> None:
    stream = Detokenizer(TOKENIZER)
    text = "".join(stream.push([token_id]) for token_id in ids) + stream.finish()
    assert text == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(st.text(min_size=1))
def test_streamed_text_never_shows_half_a_character(text: str) -> None:
    stream = Detokenizer(TOKENIZER)
    shown = ""
    for token_id in TOKENIZER.encode(text):
        shown += stream.push([token_id])
        assert text.startswith(shown)
    assert shown + stream.finish() == text


def test_a_chat_is_its_turns_and_the_assistants_name() -> None:
    ids = TOKENIZER.encode_chat([("system", "Be brief."), ("user", "Hi\nthere")])
    assert TOKENIZER.decode(ids) == "system: Be brief.\nuser: Hi\nthere\nassistant:"


@pytest.mark.parametrize("messages", [[], [("user", "Hi"), ("tool", "x")]])
def test_a_chat_the_template_does_not_know_is_refused(messages: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="messages"):
        TOKENIZER.encode_chat(messages)


def test_a_vocabulary_without_room_for_words_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        SimTokenizer(259)
    assert SimTokenizer(260).decode([259]) == " w259"
