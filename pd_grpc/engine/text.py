"""From token ids to text as they stream, and where a stop string ends an answer."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.engine.base import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns a growing list of token ids into text, never splitting a character.

    Text is held back while its last character is incomplete, and while it could be the beginning of
    a stop string. `stopped` turns True when a stop string is complete; the text then ends before
    it, and later tokens are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._window_start = 0
        self._window_next = 0
        self._window_taken = 0
        self._text = ""
        self._emitted = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text known so far, cut at the stop string when there is one."""
        return self._text

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens one by one; returns the text that can be shown now."""
        for token_id in token_ids:
            if self.stopped:
                break
            self._ids.append(token_id)
            self._extend(final=False)
        return self._release(final=False)

    def finish(self) -> str:
        """The text still held back, once no token will follow."""
        if not self.stopped:
            self._extend(final=True)
        return self._release(final=True)

    def _extend(self, final: bool) -> None:
        # Decoding from a few tokens back keeps spaces right for tokenizers that strip them at the
        # start; only what the window holds beyond the text already taken from it is new.
        window = self._tokenizer.decode(self._ids[self._window_start :])
        complete = window if final else window.rstrip(_REPLACEMENT)
        new = complete[self._window_taken :]
        if not new:
            return
        start = len(self._text)
        self._text += new
        self._window_taken = len(complete)
        if len(complete) == len(window):
            self._window_start, self._window_next = self._window_next, len(self._ids)
            kept = self._ids[self._window_start :]
            self._window_taken = len(self._tokenizer.decode(kept))
        self._cut_at_stop(start)

    def _cut_at_stop(self, new_from: int) -> None:
        if len(self._ids) < self._min_tokens:
            return
        found = []
        for stop in self._stop:
            at = self._text.find(stop, max(0, new_from - len(stop) + 1))
            if at >= 0:
                found.append(at)
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _release(self, final: bool) -> str:
        end = len(self._text)
        if not final and not self.stopped:
            end -= self._held_back()
        out = self._text[self._emitted : max(self._emitted, end)]
        self._emitted = max(self._emitted, end)
        return out

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if stop.startswith(self._text[-size:]):
                    longest = size
                    break
        return longest
