"""Whether the answers of a model can follow a grammar. Importing this needs no llguidance."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pd_grpc.engine.hf_tokenizer import HfTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from pd_grpc.engine.grammar import Grammars


def constraint_of(
    tokenizer: HfTokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> Grammars | None:
    """The grammars of a model, none of them compiled. None where llguidance is not installed or
    cannot tell the bytes that the tokens stand for, or where nothing could end an answer."""
    if find_spec("llguidance") is None or not eos_token_ids:
        return None
    decoder = tokenizer.decoder()
    if "ByteLevel" not in decoder and "ByteFallback" not in decoder:
        return None
    from pd_grpc.engine.grammar import Grammars

    def read() -> LLTokenizer:
        from llguidance import LLTokenizer

        ends = sorted(eos_token_ids)
        return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=ends)

    return Grammars(read, vocab_size, eos_token_ids)
