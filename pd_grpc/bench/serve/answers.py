"""Whether two deployments gave the same request the same answer.

Both take the likeliest token each time. In bf16 the sums behind it come out a little different for
another batch or another number of threads, so where two tokens are about as likely, either may be
taken, and the answers differ from there on. Wrong is an answer that leaves the other by a token
that is not about as likely as the likeliest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pd_grpc.bench.serve.deployments import Deployments
from pd_grpc.bench.serve.load import Request
from pd_grpc.bench.serve.timing import Heard

TIE_NATS = 0.5
"""Log-probabilities that lie no farther apart are about as likely. Logits of 16 to 32 are 0.125
apart in bf16, and what went into them was rounded at every layer."""


@dataclass
class Comparison:
    """Answers of two deployments to the same requests, as far as both came whole."""

    equal: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)
    widest_nats: float = 0.0
    """How far below the likeliest the tokens of ties were, at the most."""

    @property
    def compared(self) -> int:
        """How many there were."""
        return self.equal + self.ties + len(self.wrong)

    def judge(self, name: str, likeliest: Mapping[int, float], tokens: Sequence[int]) -> None:
        """Two answers go apart by these tokens, where these are the likeliest. Where none is known
        nothing excuses it."""
        best = max(likeliest.values(), default=0.0)
        below = max(best - likeliest.get(token, float("-inf")) for token in tokens)
        if below <= TIE_NATS:
            self.ties += 1
            self.widest_nats = max(self.widest_nats, below)
        else:
            self.wrong.append(f"{name}: {below:g} nats below the likeliest token")


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers of one length begin to differ; None when they do not."""
    for at, (token, another) in enumerate(zip(one, other, strict=True)):
        if token != another:
            return at
    return None


async def compare(
    deployments: Deployments,
    requests: Sequence[Request],
    ones: Sequence[Heard],
    others: Sequence[Heard],
    into: Comparison,
) -> None:
    """Compare answer by answer."""
    for request, one, other in zip(requests, ones, others, strict=True):
        if not (one.finished and other.finished):
            continue
        at = parting(one.token_ids, other.token_ids)
        if at is None:
            into.equal += 1
            continue
        likeliest = await deployments.rank(request.token_ids, one.token_ids[:at])
        into.judge(request.name, likeliest, (one.token_ids[at], other.token_ids[at]))
