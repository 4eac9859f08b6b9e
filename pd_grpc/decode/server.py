"""A whole D in one process: control loop, bulk thread, engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.decode.bulk import BulkServer
from pd_grpc.decode.carrier import Carrier
from pd_grpc.decode.events import Leaving
from pd_grpc.decode.machine import DecodeMachine, Model
from pd_grpc.decode.metrics import DecodeMetrics
from pd_grpc.decode.receiver import Receiver
from pd_grpc.decode.runtime import DecodeRuntime
from pd_grpc.decode.service import DecodeInference, DecodeService
from pd_grpc.decode.sessions import Offer
from pd_grpc.decode.spans import DecodeSpans
from pd_grpc.decode.view import DecodeView
from pd_grpc.engine.base import Engine
from pd_grpc.engine.model_info import model_info
from pd_grpc.protocol import interception
from pd_grpc.protocol.admin import AdminService, ChangeFeed
from pd_grpc.protocol.clock import Clock, SystemClock
from pd_grpc.protocol.config import DecodeConfig
from pd_grpc.protocol.interception import Interceptors, Wire
from pd_grpc.protocol.layout_checks import check_layout
from pd_grpc.protocol.life_log import LifeLog
from pd_grpc.protocol.refs import mint_epoch, mint_id
from pd_grpc.protocol.rpc import PortInUse
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.protocol.shards import Place
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.tracing import Tracing
from pd_grpc.transport.base import NotUsable, ReceiveSide, ReceiveTransport, TransportKind
from pd_grpc.transport.registry import build, find
from pd_grpc.v1 import (
    admin_pb2_grpc,
    decode_pb2_grpc,
    inference_pb2_grpc,
    layout_pb2,
    types_pb2,
)

STOP_GRACE_S = 0.5
"""For the last statuses to leave; whatever runs then has been ended already."""

SERVICES = (
    "pd_grpc.v1.DecodeService",
    "pd_grpc.v1.InferenceService",
    "pd_grpc.v1.AdminService",
)


@dataclass
class DecodeServer:
    """A running D. To be stopped on the loop that started it."""

    instance: types_pb2.Instance
    pool: BlockPool
    machine: DecodeMachine
    control: ControlServer
    shards: Sequence[BulkServer]
    runtime: DecodeRuntime
    view: DecodeView
    changes: ChangeFeed
    engine: Engine
    life: LifeLog

    @property
    def name(self) -> str:
        """Stable name of the instance."""
        return self.instance.name

    @property
    def bulk(self) -> BulkServer:
        """Its shard; of several the first."""
        return self.shards[0]

    @property
    def endpoint(self) -> str:
        """host:port of the control endpoint."""
        return self.control.endpoint

    def drain(self, deadline_s: float | None = None) -> int:
        """Take nothing new; returns what is in flight. `drained` tells when that has ended."""
        return self.view.drain(deadline_s)

    async def drained(self) -> None:
        """Wait until a drain has nothing left to finish."""
        await self.runtime.drained.wait()

    async def start(self) -> None:
        """Answer calls, run what makes the first step slow, then turn ready. No request gets the
        block that the engine may write to meanwhile."""
        block = self.pool.reserve(1, owner="warm-up")
        assert block.blocks == [0], "the engine warms up on block 0"
        try:
            await self.control.start()
            self.life.started("decode", self.endpoint)
            await self.runtime.on_engine_thread(self.engine.warm_up)
        finally:
            block.release()
            self.runtime.wake()
        if not self.machine.ledger.draining:
            self.control.set_ready(True)

    async def stop(self) -> None:
        """End everything now: calls, streams, threads. A step that runs is waited for."""
        self.changes.close()
        self.runtime.feed(Leaving())
        self.runtime.grammar_check.leave()
        await self.control.stop(STOP_GRACE_S)
        await asyncio.to_thread(_stop, self.shards)
        await self.runtime.stop()
        self.engine.close()
        self.life.stopped()


async def start_decode(
    config: DecodeConfig,
    engine: Engine,
    *,
    clock: Clock | None = None,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    decode_service: Callable[[DecodeRuntime, DecodeConfig], DecodeService] = DecodeService,
    inference: type[DecodeInference] = DecodeInference,
    interceptors: Interceptors = interception.NONE,
) -> DecodeServer:
    """Start a D over an engine on the running loop; `decode_service` and `inference` are what P
    and clients call, through `interceptors`. Metrics go to the process's own provider unless there
    is another. BadLayout when the engine's layout is none that P can be told of, PortInUse when a
    port is taken."""
    check_layout(engine.layout)
    clock = clock or SystemClock()
    epoch = mint_epoch(clock)
    unusable: dict[str, NotUsable] = {}
    wire = Wire(interceptors)
    made = [
        _shard(config, engine, index, epoch, clock, wire, unusable)
        for index in range(len(engine.shards))
    ]
    shards, transports = [shard for shard, _ in made], made[0][1]
    await asyncio.to_thread(_start, shards)
    # Only now do they know where they listen.
    carriers = [
        Carrier(value, kind.one_sided, half.metadata())
        for value, (kind, half) in transports.items()
    ]
    # The control port last: grpc does not let go of one before its server has been started.
    control = ControlServer(config, "decode", SERVICES, wire)
    try:
        control.bind()
    except PortInUse:
        await asyncio.to_thread(_stop, shards)
        raise
    instance = types_pb2.Instance(name=control.name, epoch=epoch, role=types_pb2.ROLE_DECODE)
    log = InstanceLog("decode", instance.name)
    life = LifeLog(log)
    control.on_readiness = life.readiness
    for name, why in unusable.items():
        log.note(Event.TRANSPORT_UNUSABLE, f"no KV by {name}: {why}")
    machine = _machine(config, engine, instance, shards, carriers)
    tracing = Tracing(clock, instance.name, "decode", tracer_provider, config.traces_kept)
    instruments = Instruments(instance.name, meter_provider)
    wire.connect(log, tracing, instruments)
    changes = ChangeFeed()
    runtime = DecodeRuntime(machine, engine, clock, DecodeSpans(tracing), control.set_ready, log)
    runtime.connect(shards)
    for shard in shards:
        shard.listeners.append(runtime.feed_from_thread)
    view = DecodeView(config, engine.name, runtime, control, clock, changes, tracing.recent)
    metrics = DecodeMetrics(instruments, machine, clock)
    runtime.listeners += [view.changed, metrics.changed]
    runtime.event_listeners.append(metrics.heard)
    runtime.fault_listeners.append(metrics.refused)
    info = model_info(engine)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(
        decode_service(runtime, config), control.server
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        inference(runtime, config, info), control.server
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(view, changes), control.server)
    server = DecodeServer(
        instance, machine.pool, machine, control, shards, runtime, view, changes, engine, life
    )
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server


def _shard(
    config: DecodeConfig,
    engine: Engine,
    index: int,
    epoch: int,
    clock: Clock,
    wire: Wire,
    unusable: dict[str, NotUsable],
) -> tuple[BulkServer, Mapping[int, tuple[TransportKind, ReceiveTransport]]]:
    """One of the engine's shards as a server, and how KV gets there; `unusable` hears how not."""
    mine = engine.shards[index]
    side = ReceiveSide(engine.layout, mine.memory, config.host)
    transports = build(
        find(config.transports),
        len(engine.shards),
        lambda kind: kind.receive(side),
        lambda kind, why: unusable.setdefault(kind.name, why),
    )
    halves = {value: half for value, (_, half) in transports.items()}
    part = mine.place.part
    receiver = Receiver(config, engine.layout, mine.memory, epoch, halves, index, part)
    return BulkServer(config, receiver, clock, wire, halves.values(), index), transports


def _start(shards: Sequence[BulkServer]) -> None:
    """Start every one or, when one cannot bind, none."""
    started: list[BulkServer] = []
    try:
        for shard in shards:
            shard.start()
            started.append(shard)
    except PortInUse:
        _stop(started)
        raise


def _stop(shards: Sequence[BulkServer]) -> None:
    for shard in shards:
        shard.stop()


def _machine(
    config: DecodeConfig,
    engine: Engine,
    instance: types_pb2.Instance,
    shards: Sequence[BulkServer],
    carriers: Sequence[Carrier],
) -> DecodeMachine:
    offer = Offer(
        instance=instance,
        layout=engine.layout,
        shards=[
            _told(mine.place, shard.endpoint)
            for mine, shard in zip(engine.shards, shards, strict=True)
        ],
        features=frozenset(engine.features),
        max_model_len=engine.max_model_len,
        timeouts=config,
        carriers=carriers,
    )
    model = Model(
        engine.vocab_size, engine.eos_token_ids, engine.tokenizer(), frozenset(engine.features)
    )
    pool = BlockPool(engine.memory.num_blocks)
    return DecodeMachine(config, pool, offer, model, mint_id)


def _told(place: Place, endpoint: str) -> layout_pb2.Shard:
    """A shard as a P is told of it."""
    shard = place.to_proto()
    shard.endpoint = endpoint
    return shard
