"""What all requests of one router share."""

from __future__ import annotations

from dataclasses import dataclass

from pd_grpc.engine.base import Tokenizer
from pd_grpc.protocol.clock import Clock
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.router.discovery import Discovery
from pd_grpc.router.in_flight import InFlight
from pd_grpc.router.policies import LeastLoad
from pd_grpc.router.recovery import Recovery
from pd_grpc.telemetry.instance_log import InstanceLog


@dataclass(frozen=True)
class Routing:
    """What all requests of one router share; `name` is the router's."""

    name: str
    log: InstanceLog
    config: RouterConfig
    clock: Clock
    tokenizer: Tokenizer
    discovery: Discovery
    prefill_load: LeastLoad
    decode_load: LeastLoad
    in_flight: InFlight
    recovery: Recovery
