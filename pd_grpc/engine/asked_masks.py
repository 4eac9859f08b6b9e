"""What a model's layers may see of earlier tokens, by the masks that it asks transformers for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from pd_grpc.engine.paged_attention import UnsupportedAttention, paged_attention

WATCHED_NAME = "pd_paged_watched"
"""The paged attention, for a model whose masks are watched."""

# Of a query at position q, a key at position k of the same sequence: whether q sees k.
MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


class AskedMasks:
    """The masks that a model asks for while its attention is `WATCHED_NAME`.

    With the paged attention a model gets no mask, whatever it asks for. A window that acts later
    than any short text shows, or a chunk, would go unnoticed; what was asked for tells of both.
    """

    def __init__(self) -> None:
        self._functions: list[MaskFunction] = []
        AttentionMaskInterface.register(WATCHED_NAME, self._note)

    def check(self, length: int) -> None:
        """UnsupportedAttention unless every mask asked for is the causal one at each position of a
        sequence of `length` tokens; of queries a sample is looked at."""
        keys = torch.arange(length)[None]
        queries = torch.tensor(_sample(length))[:, None]
        causal = keys <= queries
        for sees in self._functions:
            try:
                seen = sees(0, 0, queries, keys).expand(causal.shape)
            except (RuntimeError, IndexError, TypeError) as error:
                text = f"its mask does not say what a token sees: {error}"
                raise UnsupportedAttention(text) from error
            if not torch.equal(seen, causal):
                query, key = (int(at[0]) for at in torch.nonzero(seen != causal, as_tuple=True))
                at = int(queries[query])
                sees_it = "sees" if seen[query, key] else "does not see"
                raise UnsupportedAttention(
                    f"its token at position {at} {sees_it} the one at {key}, which is no plain "
                    f"causal attention over max_model_len ({length})"
                )

    def _note(self, *args: Any, mask_function: MaskFunction, **options: Any) -> None:
        self._functions.append(mask_function)


def _sample(length: int) -> list[int]:
    """Positions that grow by about a half, the last among them."""
    found, at = [], 0
    while at < length - 1:
        found.append(at)
        at += 1 + at // 2
    return [*found, length - 1]


AttentionInterface.register(WATCHED_NAME, paged_attention)
