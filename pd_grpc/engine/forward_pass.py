"""The forward pass of a model over packed rows, by its own code or by quicker code of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pd_grpc.engine.batch_rows import steady_group
from pd_grpc.engine.lean_model import LeanModel, fits
from pd_grpc.engine.packed_linear import Linear
from pd_grpc.engine.paged_attention import Attends


class ForwardPass(Protocol):
    """Rows of tokens to logits; attention is what `step` makes of it."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: Attends, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Logits `(wanted, vocab)` of the rows `wanted`; ids and positions are `(rows,)`."""
        ...


class ModelPass:
    """By transformers' own code; the model has the attention `pd_paged`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: Attends, wanted: torch.Tensor
    ) -> torch.Tensor:
        out = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            pd_step=step,
        )
        logits: torch.Tensor = out.logits[0]
        return logits


@dataclass(frozen=True)
class Passing:
    """A forward pass, and the groups of rows in which a row's bits do not depend on the others:
    `rows_group` of those that go in, `wanted_group` of those whose logits are wanted."""

    forward: ForwardPass
    rows_group: int
    wanted_group: int

    @classmethod
    def by_model(cls, model: Any) -> Passing:
        """By the model's own code."""
        linears = [
            Linear([module.weight], [module.bias])
            for module in model.modules()
            if isinstance(module, torch.nn.Linear)
        ]
        group = steady_group(linears)
        return cls(ModelPass(model), group, group)

    @classmethod
    def quickest(cls, model: Any, agrees: Callable[[ForwardPass], bool]) -> Passing:
        """By code of ours where it knows the model and `agrees` with it; the model is then of no
        other use, for its weights are taken."""
        lean = _lean(model)
        if lean is None or not agrees(lean):
            return cls.by_model(model)
        lean.settle()
        return cls(lean, steady_group(lean.linears()), steady_group([lean.head]))


def _lean(model: Any) -> LeanModel | None:
    try:
        return LeanModel(model) if fits(model) else None
    except AttributeError:
        # A release of transformers that names something else.
        return None
