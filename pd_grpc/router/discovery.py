"""The instances behind the router: who they are, and whether they take requests.

Each configured endpoint has a task that holds a health Watch open: readiness comes as it changes,
nothing is polled. A broken Watch means "not ready" until it is back. Who answers, and what it
serves, is asked anew behind each Watch, so that a restarted instance is met under its new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Reason
from pd_grpc.protocol.interception import Wire
from pd_grpc.router.intake import Limits
from pd_grpc.router.policies import Target, no_instance
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.log_events import Event
from pd_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2_grpc,
    types_pb2,
)

_SERVICES = {
    types_pb2.ROLE_PREFILL: "pd_grpc.v1.PrefillService",
    types_pb2.ROLE_DECODE: "pd_grpc.v1.DecodeService",
}
_ROLE_NAMES = {types_pb2.ROLE_PREFILL: "prefill", types_pb2.ROLE_DECODE: "decode"}
_UNTOLD = 2**32
"""In place of a limit that no instance tells: theirs to refuse."""


@dataclass
class InstanceView:
    """One instance as the router knows it, and the way to call it."""

    endpoint: str
    role: types_pb2.Role
    channel: grpc.aio.Channel
    name: str = ""
    epoch: int = 0
    ready: bool = False
    reason: str = "not reached yet"
    """Why it is not ready; empty when it is."""
    model: inference_pb2.GetModelInfoResponse | None = None
    serving: bool = False
    """What its health Watch said last."""
    declines: bool = False
    """Whether it answers and takes no requests; otherwise, if it is not ready, it may be soon."""

    def __post_init__(self) -> None:
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self.channel)

    @property
    def role_name(self) -> str:
        """`prefill` or `decode`."""
        return _ROLE_NAMES[self.role]

    @property
    def target(self) -> Target:
        """As policies see it."""
        return Target(self.name, self.endpoint, self.epoch)


class _NotUsable(Exception):
    """The instance answers, but is not what was configured."""


class Discovery:
    """Watches every configured instance. `on_change` hears of each change of readiness."""

    def __init__(
        self,
        config: RouterConfig,
        on_change: Callable[[], None],
        log: InstanceLog,
        wire: Wire | None = None,
    ) -> None:
        self._config = config
        self._on_change = on_change
        self._log = log
        self._wire = wire or Wire()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._instances = [
            *(self._view(endpoint, types_pb2.ROLE_PREFILL) for endpoint in self._prefill()),
            *(self._view(endpoint, types_pb2.ROLE_DECODE) for endpoint in config.decode),
        ]
        self._by_endpoint = {view.endpoint: view for view in self._instances}

    @property
    def instances(self) -> list[InstanceView]:
        """Every instance that is configured, prefill first."""
        return self._instances

    def start(self) -> None:
        """Begin to watch."""
        self._tasks = {
            asyncio.create_task(self._keep_watching(view), name=f"watch {view.endpoint}")
            for view in self._instances
        }
        for task in self._tasks:
            task.add_done_callback(self._report)

    async def stop(self) -> None:
        """Stop watching and close every channel."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for view in self._instances:
            await view.channel.close(None)

    def at(self, endpoint: str) -> InstanceView:
        """The instance at an endpoint. KeyError for one that is not configured."""
        return self._by_endpoint[endpoint]

    async def changed(self) -> None:
        """Wait for the next change of any instance."""
        await self._changed.wait()

    def ready(self, role: types_pb2.Role) -> list[Target]:
        """The instances of a role that take requests."""
        return [view.target for view in self._instances if view.role == role and view.ready]

    def others_out_of_reach(self, target: Target) -> bool:
        """Whether an instance of this one's role, at another address, is neither ready nor says
        that it takes no requests."""
        role = self.at(target.endpoint).role
        others = [v for v in self._instances if v.role == role and v.endpoint != target.endpoint]
        return any(not (view.ready or view.declines) for view in others)

    async def found(self, limit_s: float) -> None:
        """Wait for at most `limit_s` while a role has several instances, none of them is ready, and
        one of them is out of reach."""

        async def look() -> None:
            while self._lacks_for_now():
                await self.changed()

        if self._lacks_for_now():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(look(), limit_s)

    def _lacks_for_now(self) -> bool:
        name = self.missing_role()
        views = [view for view in self._instances if view.role_name == name]
        return len(views) > 1 and any(not (view.ready or view.declines) for view in views)

    def missing_role(self) -> str | None:
        """A role without which nothing can be served and that has no ready instance."""
        if not self._config.aggregated and not self.ready(types_pb2.ROLE_PREFILL):
            return "prefill"
        return None if self.ready(types_pb2.ROLE_DECODE) else "decode"

    def model(self) -> inference_pb2.GetModelInfoResponse:
        """What is served: the first ready instance's word, with the least of everyone's limits.

        Fault NO_INSTANCE when no instance of a needed role is ready.
        """
        if (role := self.missing_role()) is not None:
            raise no_instance(role)
        models = [view.model for view in self._instances if view.ready and view.model is not None]
        model = inference_pb2.GetModelInfoResponse()
        model.CopyFrom(models[0])
        model.ClearField("layout")
        model.max_model_len = _least(m.max_model_len for m in models)
        model.vocab_size = _least(m.vocab_size for m in models)
        features = set.intersection(*(set(m.features) for m in models))
        model.ClearField("features")
        model.features.extend(sorted(features))
        return model

    def limits(self) -> Limits:
        """What every ready instance can take. Fault NO_INSTANCE as for `model`."""
        model = self.model()
        most = model.max_model_len or _UNTOLD, model.vocab_size or _UNTOLD
        return Limits(*most, frozenset(model.features))

    def suspect(self, endpoint: str) -> None:
        """A call said that another instance or epoch answers there: find out who it is."""
        view = self._by_endpoint[endpoint]
        if view.ready:
            self._set(view, False, "another instance or epoch answers here")
            task = asyncio.create_task(self._identify_again(view), name=f"identify {endpoint}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _prefill(self) -> tuple[str, ...]:
        return () if self._config.aggregated else self._config.prefill

    def _view(self, endpoint: str, role: types_pb2.Role) -> InstanceView:
        channel = self._wire.aio_channel(endpoint, self._config, self._config)
        return InstanceView(endpoint, role, channel)

    async def _keep_watching(self, view: InstanceView) -> None:
        """Watch for ever; after a break wait for the connection instead of trying in a loop."""
        back_off_s = self._config.reconnect_min_s
        while True:
            await view.channel.channel_ready()
            try:
                await self._watch(view)
                why = "its health watch ended"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except _NotUsable as error:
                why = str(error)
            was_ready = view.ready
            self._set(view, False, why)
            back_off_s = (
                self._config.reconnect_min_s
                if was_ready
                else min(2 * back_off_s, self._config.watch_backoff_max_s)
            )
            # Bounds the rate where the connection holds and the answer is wrong.
            await asyncio.sleep(back_off_s)

    async def _watch(self, view: InstanceView) -> None:
        watch = view.health.Watch(health_pb2.HealthCheckRequest(service=_SERVICES[view.role]))
        try:
            async for response in watch:
                view.serving = response.status == health_pb2.HealthCheckResponse.SERVING
                view.declines = not view.serving
                if view.serving:
                    await self._identify(view)
                    self._set(view, True, "")
                else:
                    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
                    self._set(view, False, f"it says {status}")
        finally:
            view.serving = view.declines = False
            watch.cancel()

    async def _identify_again(self, view: InstanceView) -> None:
        try:
            await self._identify(view)
        except grpc.aio.AioRpcError as error:
            self._set(view, False, f"{error.code().name}: {error.details()}")
        except _NotUsable as error:
            self._set(view, False, str(error))
        else:
            self._set(view, view.serving, "" if view.serving else "its health watch broke")

    async def _identify(self, view: InstanceView) -> None:
        """Ask who answers and what it serves. _NotUsable when it has another role."""
        call: dict[str, Any] = {"timeout": self._config.call_s}
        info, model = await asyncio.gather(
            view.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), **call),
            view.inference.GetModelInfo(inference_pb2.GetModelInfoRequest(), **call),
        )
        instance = info.server.instance
        if instance.role != view.role:
            actual = types_pb2.Role.Name(instance.role).removeprefix("ROLE_").lower()
            raise _NotUsable(f"{instance.name} is a {actual} instance, not a {view.role_name} one")
        if view.epoch and view.epoch != instance.epoch:
            text = "%s instance at %s was restarted"
            peer = instance.name
            self._log.note(Event.PEER_RESTARTED, text, view.role_name, view.endpoint, peer=peer)
        view.name, view.epoch, view.model = instance.name, instance.epoch, model

    def _set(self, view: InstanceView, ready: bool, reason: str) -> None:
        if view.ready != ready or view.reason != reason:
            event = Event.PEER_READY if ready else Event.PEER_NOT_READY
            state = "ready" if ready else f"not ready: {reason}"
            text, peer = "%s instance at %s is %s", view.name or view.endpoint
            self._log.note(event, text, view.role_name, view.endpoint, state, peer=peer)
        view.ready, view.reason = ready, reason
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def _report(self, task: asyncio.Task[None]) -> None:
        """A watcher ends only when it is told to; anything else is a defect to be seen."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.note(Event.DEFECT, "%s failed", task.get_name(), error=error)


def _least(limits: Iterable[int]) -> int:
    """The least of the limits that are told; 0 when none is."""
    return min((limit for limit in limits if limit), default=0)


MISTAKEN_IDENTITY = frozenset({Reason.WRONG_INSTANCE, Reason.STALE_EPOCH})
"""Faults of a leg that mean: ask again who is there."""
