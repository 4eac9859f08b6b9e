"""Several answers to one request, without a socket or a clock: when each begins, and whose turn it
is to be heard. The rules:

* **Held back.** Choice 0 begins alone where the prompt fills a block that others could share. The
  others follow to the same P and D once it has been handed over: then their prompt is computed and
  sent, for whoever keeps a prefix cache. Begun at once each would compute it for itself. An answer
  may be whole without a word of that; then they follow too.
* **One for all.** A choice that fails for good fails the request, whatever the others have said: an
  answer with a choice missing is no answer. The others are left; what they have said before is
  given to the client first.
* **Turns.** Of the choices that have something to say, the one that has waited longest is next.
"""

from __future__ import annotations

from pd_grpc.router.machine import PrefillLeg
from pd_grpc.router.recovery import RecoveringRequest
from pd_grpc.v1 import types_pb2


def shares_prompt(prompt_tokens: int, block_size: int) -> bool:
    """Whether choices have KV in common that a prefix cache may keep: whole blocks that end before
    the last token, which each computes for itself. A `block_size` of 0 is not known."""
    return prompt_tokens > block_size


def knows_prompt(request: RecoveringRequest) -> bool:
    """Whether P and D have the prompt's KV, as far as its legs have told: it was handed over, or a
    token has come that D has only then."""
    attempt = request.request
    if attempt.prefill is PrefillLeg.HANDED_OFF:
        return True
    return request.tokens > (0 if attempt.prefill is PrefillLeg.NONE else 1)


class Choices:
    """Of `count` choices: which have begun and ended, what they came to, and whose turn it is."""

    def __init__(self, count: int, held_back: bool) -> None:
        self._count = count
        self._held_back = held_back
        self._begun = 0
        self._to_say: dict[int, None] = {}
        self._said = 0
        self.total = types_pb2.Usage()
        """What those came to that have said all."""

    def start(self) -> range:
        """The choices that begin: the first, and the others unless they are held back."""
        return self._begin(1 if self._held_back else self._count)

    def prompt_known(self) -> range:
        """The choices that begin now that the first knows the prompt, or is whole; none if they
        have."""
        return self._begin(self._count)

    def has_to_say(self, choice: int) -> None:
        """A choice has a message, or more than one."""
        self._to_say.setdefault(choice)

    def next(self) -> int | None:
        """Whose message is next. It has to say again when it has another one."""
        choice = next(iter(self._to_say), None)
        if choice is not None:
            del self._to_say[choice]
        return choice

    def said_all(self, choice: int, usage: types_pb2.Usage) -> None:
        """The last message of a choice has been taken."""
        self._said += 1
        self.total.completion_tokens += usage.completion_tokens
        if choice == 0:
            self.total.prompt_tokens = usage.prompt_tokens
            self.total.cached_tokens = usage.cached_tokens

    @property
    def complete(self) -> bool:
        """Whether the last message of every choice has been taken."""
        return self._said == self._count

    def _begin(self, until: int) -> range:
        begin = range(self._begun, until)
        self._begun = until
        return begin
