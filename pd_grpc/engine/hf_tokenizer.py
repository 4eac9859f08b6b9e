"""A transformers tokenizer behind the `Tokenizer` of `base`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import copy
from typing import Any

from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_source import ModelSource


class HfTokenizer:
    """Safe from any thread.

    A lock guards every call: encoding sets padding and truncation on the one tokenizer underneath,
    which fails while another thread is inside it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The end-of-sequence token the tokenizer names, if it names one."""
        eos = self._tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset([int(eos)])

    def decoder(self) -> str:
        """How tokens become text, as JSON of the tokenizers library; empty for a tokenizer that is
        not of it."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        with self._lock:
            return "" if backend is None else bytes(backend.decoder.__getstate__()).decode()

    def to_json(self) -> str:
        """The whole tokenizer as the tokenizers library writes it, whatever file it came from; what
        the last call set for padding and truncation is left out."""
        with self._lock:
            backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        from jinja2.exceptions import TemplateError

        if not messages:
            raise ValueError("a chat has at least one message")
        if not self._tokenizer.chat_template:
            raise ValueError("the model has no chat template")
        chat = [{"role": role, "content": content} for role, content in messages]
        with self._lock:
            try:
                text = self._tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True
                )
            except TemplateError as error:
                raise ValueError(f"the chat template refuses the messages: {error}") from error
            # The template writes what special tokens there are; a second BOS would be wrong.
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        with self._lock:
            text = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return str(text)


def read_tokenizer(source: ModelSource) -> HfTokenizer:
    """The tokenizer of a model; no weights are read. ModelError when it has none."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if source.gguf is not None:
            # AutoTokenizer would first read the whole GGUF file for its configuration.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                source.location, gguf_file=source.gguf, local_files_only=True
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                source.location, local_files_only=source.local
            )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError("model", f"{source.name} has no usable tokenizer: {error}") from error
    return HfTokenizer(tokenizer)
