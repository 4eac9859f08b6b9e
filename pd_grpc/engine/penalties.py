"""What the tokens of a request so far change about the next one.

The repetition penalty is that of Keskar and others, "CTRL", 2019, section 4.1, over prompt and
output, with the reading of negative logits that transformers and vLLM share; frequency and presence
penalty are OpenAI's, over the output alone. Their order is vLLM's: repetition, frequency, presence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pd_grpc.protocol.sampling import Sampling

_FARTHEST = 1e300
"""No penalty takes a logit farther from 0: differences between logits stay finite."""

Ids = npt.NDArray[np.int64]


class Distinct:
    """The tokens of a prompt, each once. They are told apart when they are first wanted, which is
    on the engine's thread: a million of them take a tenth of a second."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """`token_ids` are not copied, and stay as they are."""
        self._token_ids = token_ids

    @cached_property
    def ids(self) -> Ids:
        """In any order."""
        return np.fromiter({*self._token_ids}, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Tally:
    """Which tokens a request has had so far; a pure function of them.

    It never changes, and shares with the tally before it what a token more leaves as it was: that
    costs microseconds, whereas a prompt may have a million tokens.
    """

    prompt: Distinct
    output: Ids
    """Each token of the output, once, in any order."""
    counts: Ids
    """How often each of `output` has appeared."""
    generated: int
    """Tokens of output, which is the sum of `counts`."""

    def followed_by(self, token_id: int) -> Tally:
        """The tally once the output has this token too."""
        at = np.flatnonzero(self.output == token_id)
        if at.size:
            output, counts = self.output, self.counts.copy()
            counts[at] += 1
        else:
            output = np.append(self.output, token_id)
            counts = np.append(self.counts, 1)
        return Tally(self.prompt, output, counts, self.generated + 1)


def tally(prompt: Sequence[int], output: Sequence[int]) -> Tally:
    """Of the tokens of a request; what a client had already (`generated_token_ids`) is output."""
    ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
    return Tally(Distinct(prompt), ids, counts, len(output))


def penalise(logits: npt.NDArray[np.float64], sampling: Sampling, so_far: Tally) -> None:
    """Apply the penalties to `logits`, of shape `(vocab,)`, in place. One of minus infinity stays
    that; others stay finite."""
    if sampling.repetition_penalty != 1.0:
        # Once for a token, also where prompt and output have it.
        prompt = so_far.prompt.ids
        of_prompt, of_output = logits[prompt], logits[so_far.output]
        logits[prompt] = _repeated(of_prompt, sampling.repetition_penalty)
        logits[so_far.output] = _repeated(of_output, sampling.repetition_penalty)
    if so_far.generated:
        logits[so_far.output] -= sampling.frequency_penalty * so_far.counts
        logits[so_far.output] -= sampling.presence_penalty


def _repeated(logits: npt.NDArray[np.float64], penalty: float) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        changed = np.where(logits > 0, logits / penalty, logits * penalty)
    return np.where(np.isneginf(logits), logits, np.clip(changed, -_FARTHEST, _FARTHEST))
