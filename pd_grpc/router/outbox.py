"""What waits for a slow reader: one message that grows, so that it gets fewer and larger ones."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.text import Detokenizer
from pd_grpc.protocol.messages import MAX_TOKENS_PER_MESSAGE
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.router.unread import Unread
from pd_grpc.v1 import inference_pb2, types_pb2


class Outbox:
    """Tokens of one answer between D and the client, with their text.

    Holds what the client has not taken yet, and counts it in `unread`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: Sampling,
        unread: Unread,
        generated: Sequence[int] = (),
    ) -> None:
        self._unread = unread
        self._detokenizer = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
        self._detokenizer.push(generated)  # the client has this text already
        self._token_ids: list[int] = []
        self._logprobs: list[types_pb2.PositionLogprobs] = []
        self._text: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._token_ids or self._text)

    def push(self, message: inference_pb2.GenerateResponse) -> None:
        """Add what D sent."""
        self._unread.came(message)
        self._token_ids += message.token_ids
        self._logprobs += message.logprobs
        self._add_text(self._detokenizer.push(message.token_ids))

    def close(self) -> None:
        """No token will follow: the text held back goes out."""
        self._add_text(self._detokenizer.finish())

    def take(self) -> inference_pb2.GenerateResponse:
        """Everything that waits, as one message, or the first part of it when it is very much."""
        n = MAX_TOKENS_PER_MESSAGE
        message = inference_pb2.GenerateResponse(
            token_ids=self._token_ids[:n],
            logprobs=self._logprobs[:n],
            text="".join(self._text),
        )
        del self._token_ids[:n], self._logprobs[:n]
        self._text.clear()
        self._unread.taken(message)
        return message

    def _add_text(self, text: str) -> None:
        if text:
            self._text.append(text)
