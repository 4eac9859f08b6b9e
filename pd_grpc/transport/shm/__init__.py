"""The shm transport: P writes KV into D's pool, a memfd, on the same host.

`lender` hands the pool out, `borrower` gets and maps it, `mapping` is P's view of it; `receive` and
`send` are the two halves. What goes over the Unix socket is in `shm.proto`.
"""

from __future__ import annotations

from pd_grpc.transport.base import TransportKind
from pd_grpc.transport.shm.receive import ShmReceive
from pd_grpc.transport.shm.send import ShmTransport
from pd_grpc.v1 import layout_pb2

TRANSPORT = TransportKind("shm", layout_pb2.TRANSPORT_SHM, True, ShmTransport, ShmReceive)
