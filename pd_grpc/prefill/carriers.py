"""The ways P can send KV, as its machine knows them."""

from __future__ import annotations

from dataclasses import dataclass

from pd_grpc.protocol.messages import plain_transport
from pd_grpc.v1 import layout_pb2


@dataclass(frozen=True)
class Carriers:
    """Transports by their value on the wire, best first, and by which of them P itself writes into
    D's memory."""

    offered: tuple[int, ...]
    one_sided: frozenset[int] = frozenset()

    def has(self, transport: int) -> bool:
        """Whether KV can be sent by it."""
        return plain_transport(transport) in self.offered

    def writes(self, transport: int) -> bool:
        """Whether P writes by it, so that D must hear when that has ended."""
        return plain_transport(transport) in self.one_sided

    @property
    def wire(self) -> list[layout_pb2.Transport]:
        """As a hello offers them."""
        return [plain_transport(t) for t in self.offered]


INLINE_ALONE = Carriers((layout_pb2.TRANSPORT_INLINE,))
