"""A whole P in one process: control loop, bulk thread, engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import grpc.aio
from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from pd_grpc.blocks.pool import BlockPool
from pd_grpc.engine.base import Engine, KvMemory
from pd_grpc.engine.model_info import model_info
from pd_grpc.prefill.admin import PrefillView
from pd_grpc.prefill.bulk import BulkSender
from pd_grpc.prefill.carriers import Carriers
from pd_grpc.prefill.machine import PrefillMachine
from pd_grpc.prefill.metrics import PrefillMetrics
from pd_grpc.prefill.peer import DecodePeer, PeerFactory
from pd_grpc.prefill.prepare_metrics import PrepareMetrics
from pd_grpc.prefill.runtime import PrefillRuntime
from pd_grpc.prefill.service import PrefillInference, PrefillService
from pd_grpc.prefill.spans import PrefillSpans
from pd_grpc.prefill.validation import ModelLimits
from pd_grpc.protocol import interception
from pd_grpc.protocol.admin import AdminService, ChangeFeed
from pd_grpc.protocol.clock import Clock, SystemClock
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.interception import Interceptors, Wire
from pd_grpc.protocol.layout_checks import check_layout
from pd_grpc.protocol.life_log import LifeLog
from pd_grpc.protocol.refs import mint_epoch
from pd_grpc.protocol.serving import ControlServer
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.log_events import Event
from pd_grpc.telemetry.tracing import Tracing
from pd_grpc.transport.base import NotUsable, SendSide, SendTransport, TransportKind
from pd_grpc.transport.registry import build, find
from pd_grpc.v1 import (
    admin_pb2_grpc,
    inference_pb2_grpc,
    prefill_pb2_grpc,
    types_pb2,
)

SERVICES = (
    "pd_grpc.v1.PrefillService",
    "pd_grpc.v1.InferenceService",
    "pd_grpc.v1.AdminService",
)

LAST_WORDS_S = 0.5
"""How long a stopping server waits for its callers to take the status it ends them with."""


@dataclass
class PrefillServer:
    """A running P. To be stopped on the loop that started it."""

    instance: types_pb2.Instance
    pool: BlockPool
    machine: PrefillMachine
    control: ControlServer
    bulk: BulkSender
    runtime: PrefillRuntime
    view: PrefillView
    changes: ChangeFeed
    engine: Engine
    life: LifeLog

    @property
    def name(self) -> str:
        """Stable name of the instance."""
        return self.instance.name

    @property
    def endpoint(self) -> str:
        """host:port of the control endpoint."""
        return self.control.endpoint

    def drain(self, deadline_s: float | None = None) -> int:
        """Take nothing new; returns what is in flight. `drained` tells when that has ended."""
        return self.view.drain(deadline_s)

    def pause(self) -> None:
        """Ask no D for blocks and begin to compute no request until `resume`. What is in flight
        goes on, and new requests wait, within their budgets."""
        self.view.pause(True)

    def resume(self) -> None:
        """Undo `pause`."""
        self.view.pause(False)

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
            self.life.started("prefill", self.endpoint)
            await self.runtime.on_engine_thread(self.engine.warm_up)
        finally:
            block.release()
            self.runtime.wake()
        if not self.machine.draining:
            self.control.set_ready(True)

    async def stop(self) -> None:
        """End everything now: calls, streams, threads. Returns when every block is back."""
        self.changes.close()
        self.drain(0)
        self.runtime.grammar_check.leave()
        await self.control.stop(LAST_WORDS_S)
        await self.runtime.leave()
        await asyncio.to_thread(self.bulk.stop)
        await self.runtime.stop()
        self.engine.close()
        self.life.stopped()


async def start_prefill(
    config: PrefillConfig,
    engine: Engine,
    *,
    clock: Clock | None = None,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    peers: PeerFactory | None = None,
    interceptors: Interceptors = interception.NONE,
) -> PrefillServer:
    """Start a P over an engine on the running loop; `peers` makes what reaches each D, None what
    does so by gRPC with `interceptors`. Metrics go to the process's own provider unless there is
    another. BadLayout when the engine's layout is none that D can be told of, PortInUse when its
    port is taken."""
    check_layout(engine.layout)
    clock = clock or SystemClock()
    wire = Wire(interceptors)
    peers = peers or partial(DecodePeer, wire=wire)
    control = ControlServer(config, "prefill", SERVICES, wire)
    control.bind()
    instance = types_pb2.Instance(
        name=control.name, epoch=mint_epoch(clock), role=types_pb2.ROLE_PREFILL
    )
    log = InstanceLog("prefill", instance.name)
    life = LifeLog(log)
    control.on_readiness = life.readiness
    pool = BlockPool(engine.memory.num_blocks)
    unusable: dict[str, NotUsable] = {}
    ranks = [
        _transports(config, engine, shard.memory, instance, wire, unusable)
        for shard in engine.shards
    ]
    for name, why in unusable.items():
        log.note(Event.TRANSPORT_UNUSABLE, f"no KV by {name}: {why}")
    kinds = [kind for kind, _ in ranks[0].values()]
    carriers = Carriers(
        tuple(kind.value for kind in kinds),
        frozenset(kind.value for kind in kinds if kind.one_sided),
    )
    machine = PrefillMachine(
        config, instance, model_limits(engine), pool, engine.tokenizer(), carriers
    )
    tracing = Tracing(clock, instance.name, "prefill", tracer_provider, config.traces_kept)
    instruments = Instruments(instance.name, meter_provider)
    wire.connect(log, tracing, instruments)
    runtime = PrefillRuntime(
        machine, engine, config, clock, PrefillSpans(tracing), control.set_ready, log, peers
    )
    halves = [{value: half for value, (_, half) in rank.items()} for rank in ranks]
    bulk = BulkSender(
        engine.layout, halves, config.chunk_bytes, clock, runtime.feed_from_thread, log
    )
    bulk.start()
    runtime.connect(bulk)
    changes = ChangeFeed()
    view = PrefillView(config, engine.name, runtime, control, clock, changes, tracing.recent)
    preparing = PrepareMetrics(instruments, machine.placement.pool, clock)
    metrics = PrefillMetrics(instruments, machine, clock)
    runtime.listeners += [view.changed, preparing.changed, metrics.changed]
    runtime.event_listeners.append(metrics.heard)
    runtime.fault_listeners.append(metrics.refused)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(
        PrefillService(runtime, config), control.server
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        PrefillInference(model_info(engine)), control.server
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(view, changes), control.server)
    server = PrefillServer(
        instance, pool, machine, control, bulk, runtime, view, changes, engine, life
    )
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server


def _transports(
    config: PrefillConfig,
    engine: Engine,
    memory: KvMemory,
    instance: types_pb2.Instance,
    wire: Wire,
    unusable: dict[str, NotUsable],
) -> Mapping[int, tuple[TransportKind, SendTransport]]:
    """The ways in which the KV of one shard, in `memory`, can go to any of D's; `unusable` hears
    of the others."""
    side = SendSide(
        instance,
        engine.layout,
        memory,
        lambda endpoint: wire.aio_channel(
            endpoint, config, config, compression=grpc.Compression.NoCompression
        ),
    )
    return build(
        find(config.transports),
        len(engine.shards),
        lambda kind: kind.send(side),
        lambda kind, why: unusable.setdefault(kind.name, why),
    )


def model_limits(engine: Engine) -> ModelLimits:
    """What the engine can take."""
    return ModelLimits(
        layout=engine.layout,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        num_blocks=engine.memory.num_blocks,
        features=frozenset(engine.features),
        eos_token_ids=frozenset(engine.eos_token_ids),
        shards=tuple(shard.place for shard in engine.shards),
    )
