"""The KV that the kit sends: by the sim engine's rule where the subject follows it, so that every
token of the answer can be checked; otherwise bytes of the right number."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import google_crc32c

from pd_grpc.engine.sim_layouts import sim_layout
from pd_grpc.engine.sim_reference import SimKv, sim_answer
from pd_grpc.protocol.config import EngineConfig, SimLayout
from pd_grpc.protocol.layout import CANONICAL, DTYPE_BYTES, GroupKind, KvLayout
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.v1 import sampling_pb2, transfer_pb2

_SIM_MODEL = re.compile(r"sim-v1/vocab=(\d+)")


class KvRule:
    """What the KV of a sequence is, for one layout."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self._sim = _sim_config(layout)

    @property
    def is_sim(self) -> bool:
        """Whether the subject follows the sim engine's rule, so that answers are known."""
        return self._sim is not None

    def answer(
        self,
        prompt: Sequence[int],
        sampling: sampling_pb2.SamplingParams,
        generated: Sequence[int] = (),
    ) -> list[int]:
        """Every token of output after `generated`, the one that ends it included. LookupError for a
        model whose answers the kit does not know."""
        if self._sim is None:
            raise LookupError(f"the answers of {self.layout.model} are not known to the kit")
        return sim_answer(prompt, sampling_from_proto(sampling), self._sim, generated)

    def chunks(
        self, tokens: Sequence[int], blocks: Sequence[int], *, per_chunk: int = 2
    ) -> list[transfer_pb2.KvChunk]:
        """The KV of `tokens` in the logical `blocks`, layer by layer, runs of at most `per_chunk`
        blocks to a chunk."""
        stored = self._blocks(tokens)
        found = []
        for g, group in enumerate(self.layout.groups):
            size = self.layout.layer_bytes(g)
            for layer in range(group.layers):
                at = self.layout.layer_offset(g, layer)
                for run in _runs(blocks, per_chunk):
                    payload = b"".join(stored[b][at : at + size] for b in run)
                    found.append(chunk(g, layer, run[0], len(run), payload))
        return found

    def piece(
        self,
        tokens: Sequence[int],
        layers: range,
        blocks: range,
        *,
        group: int = 0,
    ) -> transfer_pb2.KvChunk:
        """One chunk of several layers: for each block in order, its bytes of these layers."""
        stored = self._blocks(tokens)
        at = self.layout.layer_offset(group, layers.start)
        size = len(layers) * self.layout.layer_bytes(group)
        payload = b"".join(stored[b][at : at + size] for b in blocks)
        message = chunk(group, layers.start, blocks.start, len(blocks), payload)
        message.layer_count = len(layers)
        return message

    def _blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """The canonical bytes of each block."""
        count = self.layout.blocks_for(len(tokens))
        if self._sim is None:
            seed = hashlib.sha256(repr(list(tokens)).encode()).digest()
            return [
                hashlib.shake_128(seed + bytes([b % 256])).digest(self.layout.block_bytes)
                for b in range(count)
            ]
        kv = SimKv(self._sim)
        rows = [kv.append(token) for token in tokens]
        return [self._canonical(rows, b) for b in range(count)]

    def _canonical(self, rows: list[bytes], block: int) -> bytes:
        """Token rows (group, layer, plane, head, dimension) as a block: group, layer, plane, head,
        token, dimension; positions beyond the prompt are zero."""
        size = self.layout.block_size
        mine = rows[block * size : (block + 1) * size]
        mine += [bytes(self.layout.token_bytes)] * (size - len(mine))
        found, at = [], 0
        for group in self.layout.groups:
            for plane in group.planes * group.layers:
                dim = plane.head_dim * DTYPE_BYTES[plane.dtype]
                for _head in range(plane.heads):
                    found += [row[at : at + dim] for row in mine]
                    at += dim
        return b"".join(found)


def chunk(
    group: int, layer: int, block_start: int, block_count: int, payload: bytes
) -> transfer_pb2.KvChunk:
    """A chunk of one layer, with its checksum."""
    return transfer_pb2.KvChunk(
        group=group,
        layer_start=layer,
        layer_count=1,
        block_start=block_start,
        block_count=block_count,
        crc32c=google_crc32c.value(payload),
        payload=payload,
    )


def _runs(blocks: Sequence[int], longest: int) -> list[list[int]]:
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][-1] + 1 == block and len(runs[-1]) < longest:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _sim_config(layout: KvLayout) -> EngineConfig | None:
    """The sim model that has this layout, if one has."""
    model = _SIM_MODEL.fullmatch(layout.model)
    if model is None or not layout.groups or layout.groups[0].kind is not GroupKind.FULL:
        return None
    if not layout.groups[0].planes:
        return None
    plane = layout.groups[0].planes[0]
    windows = [group.window for group in layout.groups if group.window]
    for name in get_args(SimLayout):
        try:
            config = EngineConfig(
                engine="sim",
                block_size=layout.block_size,
                sim_vocab=int(model[1]),
                sim_layers=layout.groups[0].layers,
                sim_heads=plane.heads,
                sim_head_dim=plane.head_dim,
                sim_layout=name,
                sim_window=windows[0] if windows else 1,
            )
            # What a subject's own packing is makes no difference: the kit sends canonical bytes.
            if sim_layout(config) == replace(layout, format=CANONICAL):
                return config
        except ValueError:
            # Numbers that no sim model has.
            return None
    return None
