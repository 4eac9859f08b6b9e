"""Attention over a paged pool in the canonical block order, as transformers calls it.

One function is registered with transformers' `AttentionInterface`. A forward pass hands it a
`Step`, which says whose rows it holds and where their KV lies. The keys stored are those after the
position encoding, and heads shared by several query heads are stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pd_grpc.engine.chunks import CUT_TOKENS
from pd_grpc.engine.device import CPU, placed
from pd_grpc.engine.pool_buffer import PoolBuffer
from pd_grpc.protocol.layout import KvLayout

ATTENTION_NAME = "pd_paged"

# What models also hand to their attention and plain causal attention has no use for. Any other
# option that has a value asks for something else: a mask, a cap, sinks, a choice of blocks.
_NO_MATTER = frozenset(
    {
        "dropout",
        "position_ids",
        "position_embeddings",
        "use_cache",
        "cache",
        "output_attentions",
        "output_router_logits",
    }
)


class UnsupportedAttention(ValueError):
    """The model asks for an attention that is not computed here; the message says which."""


class Attends(Protocol):
    """What computes the attention of one forward pass."""

    longest: int
    """Tokens of its longest sequence so far; a window of as many does not act."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of one layer: query `(heads, rows, dim)`, key and value
        `(kv heads, rows, dim)`, result `(rows, heads, dim)`."""
        ...


class PagedKv:
    """A pool of blocks as one tensor, and each layer's part of it as a strided view."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        dtype: torch.dtype,
        shared: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """`layout` has one FULL group with planes K and V of equal shape, elements of `dtype`. With
        `shared`, on the CPU alone, it lies in memory that others of this host may map."""
        group = layout.groups[0]
        plane = group.planes[0]
        shape = (num_blocks, group.layers, 2, plane.heads, layout.block_size, plane.head_dim)
        # torch's own memory where it need not be shared: it is aligned, and may have huge pages.
        if shared:
            self.shared: PoolBuffer | None = PoolBuffer(num_blocks * layout.block_bytes, True)
            self.blocks = torch.frombuffer(self.shared.view, dtype=dtype).view(shape)
        else:
            self.shared = None
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.device = device
        self.block_size = layout.block_size
        self._for_write = self.blocks.permute(1, 0, 4, 2, 3, 5).unbind(0)
        self._for_read = self.blocks.permute(1, 2, 3, 0, 4, 5).unbind(0)

    def buffer(self) -> memoryview:
        """The bytes of all blocks, one after another; shared, not copied. On the CPU alone."""
        return memoryview(self.blocks.view(torch.uint8).numpy().reshape(-1).data)

    def write(
        self,
        layer: int,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store `key` and `value`, each `(tokens, heads, head_dim)`, token i at `offsets[i]` of
        block `blocks[i]`."""
        self._for_write[layer][blocks, offsets] = torch.stack((key, value), dim=1)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tokens of `blocks` in that order, `(heads, tokens, head_dim)` each."""
        found = self._for_read[layer].index_select(2, blocks).flatten(2, 3)
        return found[0], found[1]


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a forward pass that are consecutive tokens of one sequence.

    Its tokens stand at positions `start` to `start + rows - 1`; `block_table` covers them all.
    """

    start: int
    rows: int
    block_table: Sequence[int]


class Step:
    """One forward pass over the rows of several runs, one run after another; each has a row.

    Rows beyond those of the runs are padding: nothing is stored for them and they attend to
    nothing. `on_layer(layer)` is called as soon as a layer's KV is stored for every run.
    """

    def __init__(self, kv: PagedKv, runs: Sequence[Run], on_layer: Callable[[int], None]) -> None:
        self._kv = kv
        self._on_layer = on_layer
        size = kv.block_size
        if any(run.rows < 1 for run in runs):
            raise ValueError("a run has no tokens")
        self.positions = torch.cat([torch.arange(r.start, r.start + r.rows) for r in runs])
        self.rows = len(self.positions)
        self.longest = max(run.start + run.rows for run in runs)
        tables = [torch.tensor(_table(r, size, len(kv.blocks))) for r in runs]
        self._read_blocks = torch.cat(tables)
        self._write_offsets = self.positions % size
        self._write_blocks = torch.cat(
            [
                table[torch.arange(r.start, r.start + r.rows) // size]
                for table, r in zip(tables, runs, strict=True)
            ]
        )
        self._reads = []
        row = token = 0
        for table, run in zip(tables, runs, strict=True):
            for rows, length in _pieces(run):
                mask = _causal_mask(rows, length, kv.blocks)
                self._reads.append(_Read(row, rows, token, length, mask))
                row += rows
            token += len(table) * size
        self.positions, self._read_blocks, self._write_offsets, self._write_blocks = placed(
            kv.device, self.positions, self._read_blocks, self._write_offsets, self._write_blocks
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        # Each piece of a run is computed by itself over exactly the tokens up to its end, so that a
        # request's result depends neither on its neighbours nor on where its prompt was cut.
        key, value = key[:, : self.rows], value[:, : self.rows]
        self._kv.write(
            layer,
            self._write_blocks,
            self._write_offsets,
            key.transpose(0, 1),
            value.transpose(0, 1),
        )
        self._on_layer(layer)
        keys, values = self._kv.gather(layer, self._read_blocks)
        out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
        for read in self._reads:
            q = query[:, read.row : read.row + read.rows]
            k = keys[:, read.token : read.token + read.length]
            v = values[:, read.token : read.token + read.length]
            out[read.row : read.row + read.rows] = read.attend(q, k, v, scale)
        return out


@dataclass(frozen=True)
class _Read:
    """Where the rows of a piece of a run and its gathered tokens begin, and how many there are.

    `mask` says which tokens each row sees; a single row sees them all.
    """

    row: int
    rows: int
    token: int
    length: int
    mask: torch.Tensor | None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        kv_heads, dim = k.shape[0], k.shape[2]
        if self.rows == 1:
            # The query heads that share a KV head become the rows of one small product.
            q = q.reshape(kv_heads, 1, -1, dim)
            out = scaled_dot_product_attention(q, k[:, None], v[:, None], scale=scale)
            return out.reshape(1, -1, dim)
        q = q.unflatten(0, (kv_heads, -1))
        shared = (kv_heads, q.shape[1], self.length, dim)
        out = scaled_dot_product_attention(
            q,
            k[:, None].expand(shared),
            v[:, None].expand(shared),
            attn_mask=self.mask,
            scale=scale,
        )
        return out.flatten(0, 1).transpose(0, 1)


def _pieces(run: Run) -> Iterator[tuple[int, int]]:
    """Rows of a run up to each multiple of CUT_TOKENS, and the tokens that there are by then."""
    at, end = run.start, run.start + run.rows
    while at < end:
        after = min(end, at - at % CUT_TOKENS + CUT_TOKENS)
        yield after - at, after
        at = after


def _table(run: Run, block_size: int, num_blocks: int) -> Sequence[int]:
    """The blocks of a run's tokens. IndexError for one that is not in the pool: the CPU would find
    some of them, and a device that finds one is of no use for anything afterwards."""
    blocks = run.block_table[: -(-(run.start + run.rows) // block_size)]
    if min(blocks) < 0 or max(blocks) >= num_blocks:
        raise IndexError(f"a block table has an entry outside the pool of {num_blocks}")
    return blocks


def _causal_mask(rows: int, length: int, like: torch.Tensor) -> torch.Tensor | None:
    """What is added to scores, of the kind of `like`: one of booleans would be made into such a one
    again in every layer."""
    if rows == 1:
        return None
    return like.new_full((rows, length), float("-inf")).triu(length - rows + 1)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    pd_step: Attends | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in place of its own attention.

    Query `(1, heads, rows, dim)`, key and value `(1, kv heads, rows, dim)`; the result is
    `(1, rows, heads, dim)`. UnsupportedAttention when the model asks for anything but plain causal
    attention.
    """
    if pd_step is None:
        raise UnsupportedAttention("its layers do not pass keyword arguments on to the attention")
    options["attention_mask"] = attention_mask
    window = options.pop("sliding_window", None)
    causal = options.pop("is_causal", None)
    for name, option in options.items():
        if option is not None and name not in _NO_MATTER:
            raise UnsupportedAttention(f"its attention uses {name}")
    if isinstance(window, int) and 0 < window < pd_step.longest:
        raise UnsupportedAttention(f"its attention has a sliding window of {window} tokens")
    if causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedAttention("its attention is not causal")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise UnsupportedAttention("its queries, keys and values differ in size")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention("its attention layers have no number (layer_idx)")
    return pd_step.attend(layer, query[0], key[0], value[0], scale)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
