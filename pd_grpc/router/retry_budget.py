"""How much the router may try again: what bounds a storm of retries."""

from __future__ import annotations


class RetryBudget:
    """A bucket of tokens, after gRPC's retry throttling. It begins full with `burst` tokens; each
    try elsewhere takes one, and each request that is answered whole brings `share` of one, up to
    `burst`. Without a whole token nothing is tried again.

    A try that brings the request on gives its token back, other than in gRPC: an instance that dies
    takes hundreds of streams with it at once, and each of them going on once elsewhere is no storm.
    Nor is asking again when one was told to, which takes none for a while; see `recovery`. So
    tokens are lost by tries that help nobody, and in the long run these are at most `share` of the
    requests that are answered.
    """

    def __init__(self, burst: int, share: float) -> None:
        self._burst = float(burst)
        self._share = share
        self.tokens = self._burst

    def take(self) -> bool:
        """Take one for a try elsewhere; whether there was one."""
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def give_back(self) -> None:
        """A try elsewhere has brought its request on, or was no more than an inquiry."""
        self._add(1.0)

    def answered(self) -> None:
        """A request was answered whole."""
        self._add(self._share)

    def _add(self, tokens: float) -> None:
        self.tokens = min(self._burst, self.tokens + tokens)
