"""Choosing the next token from a row of logits.

A token is a pure function of the logits, the tokens before it, the request's seed and the position
it will stand at: the random numbers it needs are a hash of seed, position and token id, so neither
the batch around a request nor the process it runs in can change it. Everything is computed in
float64.

The steps and their order are those of vLLM's `v1/sample/sampler.py`: log-probabilities are taken of
the logits as they are; then come the mask of a grammar, logit bias, min_tokens and the penalties;
then, unless it is greedy, temperature, min-p, top-k and top-p.

The logits of one prefix differ in their last bits, with the batch they were computed in and with
whether the prefix was decoded or prefilled. So each token has a random number of its own, and the
best of them all is taken: another one is only where the two best are as close as those bits. To
look up one number in the cumulative probabilities would not do, for every token's share is moved by
what changes before it, and of a large vocabulary most shares are as small as that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from pd_grpc.engine.base import Sampled, SampleSpec, TokenLogprob
from pd_grpc.engine.penalties import penalise
from pd_grpc.protocol.sampling import Sampling

Logits = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Changed = npt.NDArray[np.float32] | npt.NDArray[np.float64]
"""Logits to choose by; as they came, where the request changes nothing."""

SAMPLER_FEATURES = frozenset(
    {
        "logprobs",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
    }
)
"""What an engine has that chooses its tokens here, as `Engine.features` names them."""

_FIRST_LOOK = 512


class NotSampleable(ValueError):
    """The logits are not numbers, or leave no token that may be chosen."""


class NotFinite(NotSampleable):
    """The logits are not numbers."""


def sample(
    logits: Logits,
    spec: SampleSpec,
    eos_token_ids: Collection[int],
    mask: Mask | None = None,
) -> Sampled:
    """Choose the token that follows from `logits`, of shape `(vocab,)`; where there is a `mask`, of
    the same shape, among those that it has, which min_tokens has been minded in.

    Greedy takes the likeliest token, the lowest id among equals. Otherwise one is drawn from the
    `candidates`. NotSampleable when that is impossible.
    """
    if not np.isfinite(logits.max()):
        raise NotFinite("logits are not finite numbers")
    sampling = spec.sampling
    changed = _changed(logits, spec, eos_token_ids, mask)
    if sampling.greedy:
        token_id = int(changed.argmax())
    else:
        token_ids, weights = candidates(changed, sampling)
        token_id = _draw(token_ids, weights, uniforms(sampling.seed, spec.position, token_ids))
    if sampling.logprobs is None:
        return Sampled(token_id)
    return _with_logprobs(token_id, logits, sampling.logprobs)


def uniforms(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """For each token a number in (0, 1) with 53 random bits: number `id` (from 0) of the SplitMix64
    sequence that begins at BLAKE2b over seed and position, both as little-endian uint64. SplitMix64
    is that of Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    message = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"pd-grpc token").digest()
    start = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    # Of arrays, the arithmetic of uint64 wraps around as it is meant to.
    z = start + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    numbers: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64)
    return (numbers + 0.5) * 2.0**-53


def candidates(
    logits: Changed, sampling: Sampling
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The token ids that may be drawn, ascending, and their weights (not normalised).

    The logits are divided by the temperature. Min-p keeps the tokens that are at least so likely as
    a fraction of the likeliest one's probability; top-k then keeps the k largest logits, and top-p
    the fewest of the likeliest tokens whose probability among those left reaches p. Of equal logits
    the lower ids are kept first.
    """
    below_top = logits.astype(np.float64)
    below_top -= below_top.max()
    with np.errstate(over="ignore"):
        weights = np.exp(below_top / sampling.temperature)
    kept, likely = np.arange(len(weights), dtype=np.int64), weights
    if sampling.min_p > 0:
        # The weight of the likeliest is 1.
        kept = np.flatnonzero(weights >= sampling.min_p)
        likely = weights[kept]
    if 0 < sampling.top_k < len(kept):
        kept = kept[_largest(likely, sampling.top_k)]
    if sampling.top_p < 1.0:
        kept = kept[_nucleus(weights[kept], sampling.top_p)]
    return kept, weights[kept]


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    # Sorting a whole vocabulary costs more than the model's own step on a small model, and the
    # nucleus is nearly always among the first few hundred.
    target = top_p * weights.sum()
    for look in (_FIRST_LOOK, len(weights)):
        first = _largest(weights, min(look, len(weights)))
        ranked = first[np.argsort(-weights[first], kind="stable")]
        reached = np.cumsum(weights[ranked]) >= target
        if reached.any():
            return np.sort(ranked[: int(reached.argmax()) + 1])
    return np.arange(len(weights), dtype=np.int64)


def _largest(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest, ascending; of equal ones the first."""
    if count >= len(weights):
        return np.arange(len(weights), dtype=np.int64)
    least = np.partition(weights, -count)[-count]
    above = np.flatnonzero(weights > least)
    equal = np.flatnonzero(weights == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _draw(
    token_ids: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    chances: npt.NDArray[np.float64],
) -> int:
    """The token whose exponential clock, of a rate that is its weight, goes off first."""
    with np.errstate(divide="ignore"):
        waits = -np.log(chances) / weights
    return int(token_ids[waits.argmin()])


def _changed(
    logits: Logits,
    spec: SampleSpec,
    eos_token_ids: Collection[int],
    mask: Mask | None,
) -> Changed:
    """The logits after mask, bias, min_tokens and penalties, in this order; at least one is
    finite."""
    sampling = spec.sampling
    changed: Changed = logits
    if mask is not None:
        changed = np.where(mask, logits, np.float32(-np.inf))
        if changed.max() == -np.inf:
            raise NotSampleable("the grammar leaves no token to choose")
    if sampling.logit_bias:
        changed = changed.astype(np.float64)
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        changed[list(token_ids)] += biases
    if mask is None and spec.generated < sampling.min_tokens:
        changed = _without(changed, {*eos_token_ids, *sampling.stop_token_ids})
    if sampling.penalises:
        assert spec.tally is not None, "penalties need to know the tokens so far"
        penalised = changed.astype(np.float64)
        penalise(penalised, sampling, spec.tally)
        changed = penalised
    return changed


def _without(logits: Changed, token_ids: Collection[int]) -> Changed:
    allowed = logits.copy()
    allowed[[i for i in token_ids if 0 <= i < len(logits)]] = -np.inf
    if allowed.max() == -np.inf:
        raise NotSampleable("min_tokens and the stop token ids leave no token to choose")
    return allowed


def _with_logprobs(token_id: int, logits: Logits, count: int) -> Sampled:
    raw = logits.astype(np.float64)
    top = raw.max()
    logprobs = raw - (top + np.log(np.exp(raw - top).sum()))
    best = _largest(logprobs, count) if count else np.empty(0, np.int64)
    ranked = best[np.argsort(-logprobs[best], kind="stable")]
    return Sampled(
        token_id,
        float(logprobs[token_id]),
        tuple(TokenLogprob(int(i), float(logprobs[i])) for i in ranked),
    )
