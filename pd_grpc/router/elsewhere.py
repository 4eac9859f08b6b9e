"""Where a request can go on whose attempt has failed: what its machine asks of the fleet."""

from __future__ import annotations

from collections.abc import Sequence

from pd_grpc.engine.stopping import Finish, StopRule
from pd_grpc.router.intake import RoutableRequest
from pd_grpc.router.machine import Leg
from pd_grpc.router.policies import Pairing
from pd_grpc.router.recovery import RecoveringRequest
from pd_grpc.router.routing import Routing
from pd_grpc.router.suspects import Blame
from pd_grpc.v1 import types_pb2


class Elsewhere:
    """Looks for somebody else for one request, among the instances that are known just now."""

    def __init__(
        self, routing: Routing, request: RoutableRequest, machine: RecoveringRequest
    ) -> None:
        self._routing = routing
        self._request = request
        self._machine = machine

    def another_pair(self, blame: Blame) -> Pairing | None:
        """The least loaded pair of ready instances without those to blame, if there is one."""
        routing, discovery = self._routing, self._routing.discovery
        return self._machine.suspects.another_pair(
            blame,
            discovery.ready(types_pb2.ROLE_PREFILL),
            discovery.ready(types_pb2.ROLE_DECODE),
            routing.prefill_load,
            routing.decode_load,
            routing.config.aggregated,
        )

    def out_of_reach(self, blame: Blame) -> bool:
        """Whether an instance that could be tried in place of one to blame is gone just now."""
        pairing, discovery = self._machine.pairing, self._routing.discovery
        found = Leg.DECODE in blame and discovery.others_out_of_reach(self._machine.decode)
        if Leg.PREFILL in blame and pairing.prefill is not None:
            found = found or discovery.others_out_of_reach(pairing.prefill)
        return found

    def end_of_answer(self, output: Sequence[int]) -> Finish | None:
        """How the answer ended, when its last token came and only the word of its end was lost.
        `output` are its tokens, those that the client brought along included."""
        model = self._routing.discovery.at(self._machine.decode.endpoint).model
        eos = model.eos_token_ids if model is not None else ()
        request = self._request
        rule = StopRule(request.sampling, eos, self._routing.tokenizer, request.generated)
        ends = (rule.push(token) for token in output[len(request.generated) :])
        return next((end for end in ends if end is not None), None)
