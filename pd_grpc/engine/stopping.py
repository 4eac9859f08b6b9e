"""When an answer ends: one rule for P's first token, D's later ones and the aggregated mode."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.text import Detokenizer
from pd_grpc.protocol.sampling import Sampling
from pd_grpc.v1 import types_pb2


class Finish(enum.Enum):
    """Why an answer ended; the values are those of `FinishReason` on the wire."""

    STOP = types_pb2.FINISH_REASON_STOP
    LENGTH = types_pb2.FINISH_REASON_LENGTH

    @property
    def wire(self) -> types_pb2.FinishReason:
        """As it goes on the wire."""
        return self.value

    @classmethod
    def of_wire(cls, reason: types_pb2.FinishReason) -> Finish | None:
        """None for "not ended"; ValueError for a reason this version does not know."""
        return cls(reason) if reason else None


class StopRule:
    """Watches the output of one request.

    Output already given to the client (`generated`) counts for limits and stop strings as if it had
    been pushed, but never ends the answer by itself.
    """

    def __init__(
        self,
        sampling: Sampling,
        eos_token_ids: Collection[int],
        tokenizer: Tokenizer | None,
        generated: Sequence[int] = (),
    ) -> None:
        self._sampling = sampling
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._detokenizer: Detokenizer | None = None
        if sampling.stop:
            if tokenizer is None:
                raise ValueError("stop strings need a tokenizer")
            self._detokenizer = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
            self._detokenizer.push(generated)
        self.generated = len(generated)

    def push(self, token_id: int) -> Finish | None:
        """Count one more token of output; the reason if the answer ends with it."""
        self.generated += 1
        if self._detokenizer is not None:
            self._detokenizer.push([token_id])
        if self.generated >= self._sampling.min_tokens:
            if token_id in self._eos or token_id in self._stop_ids:
                return Finish.STOP
            if self._detokenizer is not None and self._detokenizer.stopped:
                return Finish.STOP
        if self.generated >= self._sampling.max_tokens:
            return Finish.LENGTH
        return None
