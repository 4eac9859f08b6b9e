"""A client whose router tries elsewhere: the real recovery, attempt after attempt."""

from __future__ import annotations

from typing import Any

from pd_grpc.engine.stopping import StopRule
from pd_grpc.protocol.config import RouterConfig
from pd_grpc.protocol.faults import Fault
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.router.discovery import MISTAKEN_IDENTITY
from pd_grpc.router.legs import is_about
from pd_grpc.router.machine import Action as AttemptAction
from pd_grpc.router.machine import Leg, OpenDecode, OpenPrefill, PrefillLeg, RoutingTimes
from pd_grpc.router.policies import LeastLoad, Target
from pd_grpc.router.recovery import (
    Action,
    Begin,
    RecoveringRequest,
    Recovery,
    RecoveryRules,
    Seek,
)
from pd_grpc.router.retry_budget import RetryBudget
from pd_grpc.router.suspects import Blame
from pd_grpc.testing.explorer.client_process import ClientProcess, Wish
from pd_grpc.testing.explorer.kv import EOS, TOKENIZER
from pd_grpc.testing.explorer.process import Input, server_of
from pd_grpc.testing.explorer.watching import Watching
from pd_grpc.testing.explorer.wire import BROKEN, END, Interned, Message


class RecoveringClient(ClientProcess):
    """One client with a router of its own, which watches every instance."""

    def __init__(
        self,
        name: str,
        epoch: int,
        ids: Interned,
        key: TransferKey,
        wish: Wish,
        config: RouterConfig,
        watching: Watching,
    ) -> None:
        self.watching = watching
        self.watches = {watch_of(ids, name, epoch, server): server for server in watching.names}
        self.identifying: dict[int, str] = {}
        self._loads = {"prefill": LeastLoad(), "decode": LeastLoad()}
        self._charged: list[tuple[str, str]] = []
        super().__init__(name, epoch, ids, key, wish, {}, config, False)
        self.recovering = self._new_recovering()
        self.request = self.recovering.request

    def _new_recovering(self) -> RecoveringRequest:
        config = self._config
        rules = RecoveryRules(
            config.retry, config.continuation, config.retry_attempts, config.retry_wait_s
        )
        return RecoveringRequest(
            self.wish.pairing,
            RoutingTimes(config.grace_s, config.settle_s),
            Recovery(rules, RetryBudget(config.retry_burst, config.retry_share)),
            self.now + self.wish.budget_s,
        )

    # --- what happens ----------------------------------------------------------------------------

    def _happen(self, happens: Input) -> None:
        if happens[0] == "down" and happens[1] in self.watches:
            self._watched(happens[1], self._ids.messages[happens[2]])
        elif happens[0] == "down" and happens[1] in self.identifying:
            self._identified(happens[1], self._ids.messages[happens[2]])
        else:
            super()._happen(happens)

    def _watched(self, call: int, message: Message) -> None:
        server = self.watches[call]
        if message.kind in (END, BROKEN):
            del self.watches[call]
            self.watching.lost(server)
            if not self.result:
                self.watches[self._watch(server)] = server
        else:
            self.watching.heard(server, *message.body)
        self._instances_changed()

    def _identified(self, call: int, message: Message) -> None:
        server = self.identifying.pop(call)
        if message.kind not in (END, BROKEN):
            self.watching.identified(server, *message.body)
        self._instances_changed()

    def _instances_changed(self) -> None:
        if self.recovering.waiting:
            self._perform(self.recovering.on_instances())

    def _started(self) -> None:
        self.recovering = self._new_recovering()
        self.request = self.recovering.request
        self._perform(self.recovering.start(self.now))

    def _left_alone(self) -> None:
        self._perform(self.recovering.on_client_gone(self.now))

    def _due(self) -> None:
        self._perform(self.recovering.on_time(self.now))

    def _next_timer(self) -> float | None:
        return self.recovering.next_timer()

    def _took(self, actions: list[AttemptAction]) -> None:
        self._perform(self.recovering.after(actions, self.now))

    def _failed(self, target: Target, error: Any) -> None:
        server = server_of(target.endpoint)
        if not isinstance(error, Fault) or error.reason not in MISTAKEN_IDENTITY:
            return
        of_decode = target == self.request.pairing.prefill and not is_about(target, error)
        if not of_decode and self.watching.suspect(server):
            call = self._open("identify", server, server, "identify", None)
            self.identifying[call] = server

    def _waits(self) -> bool:
        return super()._waits() or self.recovering.seeking

    # --- what it does ----------------------------------------------------------------------------

    def _perform(self, actions: list[Any]) -> None:
        action: Action
        for action in actions:
            match action:
                case Begin(attempt):
                    self._begin(attempt)
                case Seek(blame):
                    self._seek(blame)
                case _:
                    if isinstance(action, OpenPrefill | OpenDecode):
                        self._charge(action)
                    super()._perform([action])

    def _begin(self, attempt: int) -> None:
        for call in self.asking:
            self._cancel(call)
        self.asking.clear()
        open_still = self.prefill_call is not None and self.request.prefill is PrefillLeg.OPEN
        if self.legs or open_still:
            self._wrong("of two attempts one is at work", f"legs of attempt {self.key.attempt}")
        # What a P that has handed over may still say is heard by nobody.
        self.prefill_call = None
        self.key = TransferKey(self.key.transfer_id, attempt)
        self.request = self.recovering.request
        self.generated = list(self.tokens)

    def _seek(self, blame: Blame) -> None:
        recovering, watching = self.recovering, self.watching
        self._discharge()
        if self._is_whole():
            self._perform(recovering.on_whole(self.now))
            return
        pairing = recovering.suspects.another_pair(
            blame,
            watching.ready("p"),
            watching.ready("d"),
            self._loads["prefill"],
            self._loads["decode"],
            self.wish.pairing.prefill is None,
        )
        if pairing is not None:
            self._perform(recovering.on_pairing(pairing, self.now))
            return
        self._perform(recovering.on_nowhere(self._others_out_of_reach(blame), self.now))

    def _is_whole(self) -> bool:
        rule = StopRule(sampling_from_proto(self._sampling()), {EOS}, TOKENIZER, [])
        return any(rule.push(token) is not None for token in self.tokens)

    def _others_out_of_reach(self, blame: Blame) -> bool:
        prefill = self.recovering.pairing.prefill
        blamed = {Leg.DECODE: self.recovering.decode, Leg.PREFILL: prefill}
        return any(
            self.watching.others_out_of_reach(target.name)
            for leg, target in blamed.items()
            if leg in blame and target is not None
        )

    def _charge(self, opened: OpenPrefill | OpenDecode) -> None:
        load = "prefill" if isinstance(opened, OpenPrefill) else "decode"
        self._loads[load].charge(opened.target.endpoint, 1)
        self._charged.append((load, opened.target.endpoint))

    def _discharge(self) -> None:
        for load, endpoint in self._charged:
            self._loads[load].discharge(endpoint, 1)
        self._charged.clear()

    def _epoch_of(self, endpoint: str) -> int:
        return self.watching.epoch(server_of(endpoint))


def watch_of(ids: Interned, client: str, epoch: int, server: str) -> int:
    """The watch of an instance that is open when a client begins."""
    return ids.call("watch", client, server, f"{epoch}/{server}/0")
