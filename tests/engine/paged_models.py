"""Tiny random models in memory: what the guard says of them, and their logits with paged and with
eager attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pd_grpc.engine.batch_rows import filled
from pd_grpc.engine.model_guard import check_attention, kv_shape, refuse_unsupported
from pd_grpc.engine.paged_attention import ATTENTION_NAME, PagedKv, Run, Step
from pd_grpc.protocol.layout import GroupKind, KvGroup, KvLayout, Plane, PlaneKind

BLOCK = 8
BOUND = 1e-5
"""Norm of the difference of logits over their norm, in float32. The models here show up to 1.2e-6:
the rounding of sums in another order."""


def tiny_model(config: Any) -> Any:
    """A random model of `config` in float32, its biases and norms not those of birth, which would
    hide that one is forgotten."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return model


@torch.inference_mode()
def guarded(model: Any, max_model_len: int | None = None) -> KvLayout:
    """Its layout, once the guard has let it through as it does when it is loaded; ModelError."""
    length = max_model_len or int(getattr(model.config, "max_position_embeddings", 512))
    refuse_unsupported("tiny", model.config, length)
    model.set_attn_implementation(ATTENTION_NAME)
    shape = kv_shape("tiny", model, length)
    planes = tuple(
        Plane(kind, "float32", shape.heads, shape.head_dim) for kind in (PlaneKind.K, PlaneKind.V)
    )
    group = KvGroup(GroupKind.FULL, shape.layers, planes)
    layout = KvLayout(model="m", positions="p", block_size=BLOCK, groups=(group,))
    check_attention("tiny", model, layout, length)
    return layout


def texts_of(model: Any, lengths: Sequence[int]) -> list[list[int]]:
    chance = random.Random(len(lengths))
    return [chance.choices(range(3, model.config.vocab_size), k=length) for length in lengths]


@torch.inference_mode()
def paged_logits(
    model: Any, layout: KvLayout, texts: Sequence[list[int]], group: int = 4
) -> list[torch.Tensor]:
    """The logits of every token of texts that share each pass: chunks of 33 tokens, then the last
    five tokens one by one; filled up to `group` rows. The pool begins as NaN, its blocks lie
    scattered."""
    blocks = sum(layout.blocks_for(len(text)) for text in texts)
    kv = PagedKv(layout, blocks, torch.float32)
    kv.blocks.fill_(float("nan"))
    free = random.Random(1).sample(range(blocks), blocks)
    tables = [[free.pop() for _ in range(layout.blocks_for(len(text)))] for text in texts]
    done = [0] * len(texts)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while waiting := [i for i, text in enumerate(texts) if done[i] < len(text)]:
        runs, ids = [], []
        for i in waiting:
            left = len(texts[i]) - done[i]
            rows = 1 if left <= 5 else min(33, left - 5)
            runs.append(Run(done[i], rows, tables[i]))
            ids += texts[i][done[i] : done[i] + rows]
            done[i] += rows
        step = Step(kv, runs, lambda layer: None)
        padding = filled(step.rows, group) - step.rows
        out = model(
            input_ids=torch.tensor([[*ids, *[0] * padding]]),
            position_ids=torch.nn.functional.pad(step.positions, (0, padding))[None],
            use_cache=False,
            pd_step=step,
        ).logits[0]
        row = 0
        for i, run in zip(waiting, runs, strict=True):
            found[i].append(out[row : row + run.rows])
            row += run.rows
    return [torch.cat(parts) for parts in found]


@torch.inference_mode()
def eager_logits(model: Any, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """transformers' own, each text alone and in one piece."""
    model.set_attn_implementation("eager")
    return [model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in texts]


def greatest_gap(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    gaps = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    assert all(gap == gap for gap in gaps), "not a number"
    return max(gaps)
