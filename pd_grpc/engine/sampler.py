"""Choosing the next token from a row of logits.

A token is a pure function of the logits, the request's seed and the position it will stand at: the
random numbers it needs are a hash of seed, position and token id, so neither the batch around a
request nor the process it runs in can change it. Everything is computed in float64.

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
from pd_grpc.protocol.sampling import Sampling

Logits = npt.NDArray[np.float32]

_FIRST_LOOK = 512


class NotSampleable(ValueError):
    """The logits are not numbers, or leave no token that may be chosen."""


def sample(logits: Logits, spec: SampleSpec, eos_token_ids: Collection[int]) -> Sampled:
    """Choose the token that follows from `logits`, of shape `(vocab,)`.

    Greedy takes the likeliest token, the lowest id among equals. Otherwise the logits are divided
    by the temperature, cut by top-k and then by top-p, and one token is drawn from what is left.
    NotSampleable when that is impossible.
    """
    if not np.isfinite(logits.max()):
        raise NotSampleable("logits are not finite numbers")
    sampling = spec.sampling
    allowed = logits
    if spec.generated < sampling.min_tokens:
        allowed = _without(logits, {*eos_token_ids, *sampling.stop_token_ids})
    if sampling.greedy:
        token_id = int(allowed.argmax())
    else:
        token_ids, weights = candidates(allowed, sampling)
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
    logits: Logits, sampling: Sampling
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The token ids that may be drawn, ascending, and their weights (not normalised).

    Top-k keeps the k largest logits; top-p then keeps the fewest of the likeliest tokens whose
    probability among those left reaches p. Of equal logits the lower ids are kept first.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    kept = np.arange(len(weights), dtype=np.int64)
    if 0 < sampling.top_k < len(weights):
        kept = _largest(weights, sampling.top_k)
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


def _without(logits: Logits, token_ids: Collection[int]) -> Logits:
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
