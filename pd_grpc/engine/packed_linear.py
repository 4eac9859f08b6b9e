"""Linear layers whose weights lie as the CPU's matrix routines want them.

A product with a plain weight has oneDNN put it in order first, or do without, at every call. Of a
packed one nothing is left to do: on two cores and in bfloat16 a row takes a third to a half of the
time, and its bits depend less on how many rows there are. The plain weight is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import linear

# What rows it is packed for; any number may come.
_ROWS = 16
_PROBE_ROWS = 5
# Of the largest number that comes out; sums are made in another order.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


class Linear:
    """`x @ weight.T + bias`; of several weights the results side by side."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]):
        """Weights `(out, in)` of one `in` each; either all have a bias or none has."""
        self.in_features = int(weights[0].shape[1])
        self.out_features = sum(len(weight) for weight in weights)
        self.dtype = weights[0].dtype
        self._weights = list(weights)
        self._packed: torch.Tensor | None = None
        self.device = weights[0].device
        self._bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])

    @property
    def has_bias(self) -> bool:
        """Whether something is added."""
        return self._bias is not None

    @property
    def weight_ptr(self) -> int | None:
        """Where the plain weight lies; None of several, and of a packed one."""
        return self._weights[0].data_ptr() if len(self._weights) == 1 else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(rows, in)` to `(rows, out)`."""
        if self._packed is not None:
            found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                rows, self._packed, self._bias, "none", [], ""
            )
            return found
        if len(self._weights) == 1:
            return linear(rows, self._weights[0], self._bias)
        out = torch.cat([linear(rows, weight) for weight in self._weights], dim=-1)
        return out if self._bias is None else out + self._bias

    def join(self) -> None:
        """Make one weight of several, by one copy; theirs are let go of."""
        self._weights = [torch.cat(self._weights)] if len(self._weights) > 1 else self._weights

    def pack(self) -> None:
        """Join and pack, where this CPU has a routine for it and it computes the same."""
        self.join()
        weight = self._weights[0]
        if self.device.type != "cpu" or self.dtype not in _TOLERANCE:
            return
        rows = torch.randn(
            _PROBE_ROWS, self.in_features, generator=torch.Generator().manual_seed(0)
        )
        rows = rows.to(self.dtype)
        plain = self(rows)
        try:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
            gap = (self(rows) - plain).abs().max()
        except (AttributeError, RuntimeError):
            # Another build of torch, or another CPU.
            self._packed = None
            return
        if gap <= _TOLERANCE[self.dtype] * plain.abs().max():
            self._weights = []
        else:
            self._packed = None


@torch.inference_mode()
def run_with_rows(linears: Iterable[Linear], row_counts: Iterable[int]) -> None:
    """Run one of `linears` of each shape with each number of rows, for what that leaves behind."""
    each = {(one.in_features, one.out_features): one for one in linears}
    for rows in row_counts:
        for one in each.values():
            one(torch.zeros(rows, one.in_features, dtype=one.dtype))
