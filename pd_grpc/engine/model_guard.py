"""Refusing models that the paged attention would run wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pd_grpc.engine.asked_masks import WATCHED_NAME, AskedMasks
from pd_grpc.engine.forward_pass import ForwardPass, ModelPass
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.paged_attention import ATTENTION_NAME, PagedKv, Run, Step, UnsupportedAttention
from pd_grpc.protocol.layout import KvLayout

# Those whose turned keys do not depend on how long the sequence is, or becomes.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
# The kinds of layer that may be plain causal attention, a sliding one if its window never acts.
_FULL, _SLIDING = "full_attention", "sliding_attention"

_Result = TypeVar("_Result")

_PROBE_TOKENS = 25
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class KvShape:
    """What one token's keys, or values, of a model look like."""

    layers: int
    heads: int
    head_dim: int


def refuse_unsupported(name: str, config: Any, max_model_len: int) -> None:
    """ModelError when the configuration asks for what is not built, before any weight is read.

    `max_model_len` is how long a sequence may become; a window of as many tokens never acts."""
    for reason in _reasons(config, max_model_len):
        raise ModelError("model", f"{name} ({config.model_type}) is not supported: {reason}")


def _reasons(config: Any, max_model_len: int) -> list[str]:
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is not decoder-only")
    if getattr(config, "sub_configs", None):
        reasons.append("it is a model of several parts, not a language model alone")
    kinds = set(getattr(config, "layer_types", None) or [_SLIDING])
    other = sorted(kinds - {_FULL, _SLIDING})
    if other:
        built = f"only {_FULL} and {_SLIDING} are built"
        reasons.append(f"it has layers of kind {', '.join(other)}; {built}")
    window = getattr(config, "sliding_window", None)
    if _SLIDING in kinds and window and window < max_model_len:
        reasons.append(
            f"it has a sliding window of {window} tokens, fewer than max_model_len "
            f"({max_model_len}); with a max_model_len of {window} it would never act"
        )
    if getattr(config, "attn_temperature_tuning", False):
        # Llama4 counts from the first row of a pass, and acts after some thousand tokens.
        reasons.append("it scales queries by their place in a pass (attn_temperature_tuning)")
    kind = _varying_rope(getattr(config, "rope_parameters", None) or {})
    if kind:
        reasons.append(f"its rope_type {kind} depends on the length of the sequence")
    return reasons


def _varying_rope(parameters: dict[str, Any]) -> str:
    """The rope_type, of any kind of layer, that is none of `_FIXED_ROPE`; empty when all are."""
    each = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in each or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind not in _FIXED_ROPE:
            return str(kind)
    return ""


def kv_shape(name: str, model: Any, max_model_len: int) -> KvShape:
    """The layers, KV heads and head size of `model`, seen on a pass over one token; the
    configuration names them differently from model to model, and not always truly.

    ModelError when the layers differ, do not use the paged attention, or mask more than what comes
    later in a sequence of `max_model_len` tokens."""
    seen, masks = _Shapes(max_model_len), AskedMasks()
    token = torch.tensor([[0]], device=model.device)
    model.set_attn_implementation(WATCHED_NAME)
    _run(name, lambda: model(input_ids=token, use_cache=False, pd_step=seen))
    _run(name, lambda: masks.check(max_model_len))
    model.set_attn_implementation(ATTENTION_NAME)
    if not seen.layers:
        raise _unsupported(name, "it does not use transformers' attention interface")
    if list(seen.layers) != list(range(len(seen.layers))) or len(set(seen.layers.values())) > 1:
        raise _unsupported(name, f"its attention layers differ in number or shape: {seen.layers}")
    heads, head_dim = seen.layers[0]
    return KvShape(len(seen.layers), heads, head_dim)


@dataclass(frozen=True)
class Reference:
    """Logits of a short text by the attention of the model itself, `(tokens, vocab)`."""

    layout: KvLayout
    tokens: torch.Tensor
    logits: torch.Tensor

    def gap(self, forward: ForwardPass) -> float:
        """How far those of a pass over paged KV, in two chunks and a single token, are from them:
        the norm of the difference over theirs."""
        ours = _paged_logits(forward, self.layout, self.tokens, self.logits.dtype)
        # Row by row: in float32 all of them take more than some layers.
        rows = list(zip(ours, self.logits, strict=True))
        off = torch.stack([(row.float() - own.float()).norm() for row, own in rows]).norm()
        return float(off / torch.stack([own.float().norm() for _, own in rows]).norm())

    @property
    def allowed(self) -> float:
        """What roundings may make of it."""
        return _PROBE_TOLERANCE[self.logits.dtype]

    def agrees(self, forward: ForwardPass) -> bool:
        """Whether a pass may take the place of the model's own. One that does not run may not."""
        try:
            return self.gap(forward) <= self.allowed
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return False


def check_attention(name: str, model: Any, layout: KvLayout, max_model_len: int) -> Reference:
    """Run a short text through the paged attention in two chunks and a single token, and through
    the model's own attention in one piece. ModelError unless both agree.

    This finds what no configuration field tells: a model that attends by code of its own, or puts
    positions where the paged attention does not see them.
    """
    generator = torch.Generator().manual_seed(0)
    count = min(_PROBE_TOKENS, max_model_len)
    tokens = torch.randint(0, model.config.vocab_size, (count,), generator=generator)
    tokens = tokens.to(model.device)
    model.set_attn_implementation("eager")
    theirs = _run(name, lambda: model(input_ids=tokens[None], use_cache=False).logits[0])
    model.set_attn_implementation(ATTENTION_NAME)
    reference = Reference(layout, tokens, theirs)
    check_pass(name, ModelPass(model), reference)
    return reference


def check_pass(name: str, forward: ForwardPass, reference: Reference) -> None:
    """ModelError unless a pass over paged KV gives the logits of `reference`."""
    gap, allowed = _run(name, lambda: reference.gap(forward)), reference.allowed
    if not gap <= allowed:
        reason = f"with paged attention its logits are {gap:.2g} away from its own, over {allowed}"
        raise _unsupported(name, reason)


def _paged_logits(
    forward: ForwardPass, layout: KvLayout, tokens: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    count = len(tokens)
    blocks = layout.blocks_for(count)
    kv = PagedKv(layout, blocks, dtype, device=tokens.device)
    # No number at all, so that a read of what was not written shows.
    kv.blocks.fill_(float("nan"))
    table = list(reversed(range(blocks)))
    logits = []
    first, second = count // 2, count - 1
    for start, end in ((0, first), (first, second), (second, count)):
        if start >= end:
            continue
        step = Step(kv, [Run(start, end - start, table)], lambda layer: None)
        every = torch.arange(end - start, device=tokens.device)
        logits.append(forward(tokens[start:end], step.positions, step, every))
    return torch.cat(logits)


class _Shapes:
    """Notes the shape of each layer's keys, `(heads, head_dim)`, and attends to nothing."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.layers: dict[int, tuple[int, int]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.layers[layer] = (key.shape[0], key.shape[2])
        return query.transpose(0, 1)


def _run(name: str, forward: Callable[[], _Result]) -> _Result:
    try:
        return forward()
    except UnsupportedAttention as error:
        raise _unsupported(name, str(error)) from error
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _unsupported(name, f"it does not run: {error}") from error


def _unsupported(name: str, reason: str) -> ModelError:
    return ModelError("model", f"{name} is not supported: {reason}")
