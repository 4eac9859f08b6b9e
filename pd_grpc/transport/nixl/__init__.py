"""The nixl transport: P writes KV into D's pool through NIXL, over whatever network UCX has.

`agent` is all that is known here of the library. D makes an agent for each P that attaches
(`acceptor`), so that it can end that P's right to write, and no other's, by destroying it; P has
one for each shard (`link`). `receive` and `send` are the two halves. What goes over the connection
between them is in `nixl.proto`.
"""

from __future__ import annotations

from pd_grpc.transport.base import TransportKind
from pd_grpc.transport.nixl.receive import NixlReceive
from pd_grpc.transport.nixl.send import NixlTransport
from pd_grpc.v1 import layout_pb2

TRANSPORT = TransportKind("nixl", layout_pb2.TRANSPORT_NIXL, True, NixlTransport, NixlReceive)
