"""A tokenizer without a vocabulary file, for the sim engine."""

from __future__ import annotations

from collections.abc import Sequence

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
FIRST_BYTE_ID = 3
FIRST_WORD_ID = FIRST_BYTE_ID + 256

_ROLES = ("system", "user", "assistant")


class SimTokenizer:
    """Text as its UTF-8 bytes, one token each; every other id is a word of its own.

    Ids 0, 1, 2 are padding, beginning and end of sequence, and have no text. Id `3 + b` is the byte
    `b`. An id `w` from 259 on is the word `" w<w>"`, which only the engine produces: encoding such
    a word gives the ids of its bytes.
    """

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size` leaves room for all bytes; ValueError if not."""
        if vocab_size <= FIRST_WORD_ID:
            raise ValueError(
                f"vocab_size: {vocab_size} ids are too few, it takes {FIRST_WORD_ID + 1} at least"
            )
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """One id per UTF-8 byte; nothing is added at either end."""
        return [FIRST_BYTE_ID + byte for byte in text.encode()]

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        r"""`"<role>: <content>\n"` for each message, then `"assistant:"`. ValueError when there is
        no message or a role is none of system, user and assistant."""
        if not messages:
            raise ValueError("messages: a chat has at least one")
        for role, _ in messages:
            if role not in _ROLES:
                raise ValueError(f"messages: the role {role!r} is none of {', '.join(_ROLES)}")
        turns = [f"{role}: {content}\n" for role, content in messages]
        return self.encode("".join(turns) + "assistant:")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, bytes put together to characters where they can be, else to U+FFFD."""
        text = bytearray()
        for token_id in token_ids:
            if token_id >= FIRST_WORD_ID:
                text += b" w%d" % token_id
            elif token_id >= FIRST_BYTE_ID:
                text.append(token_id - FIRST_BYTE_ID)
        return text.decode(errors="replace")
