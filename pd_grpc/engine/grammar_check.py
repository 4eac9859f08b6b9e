"""What P and D ask of a grammar before they take its request in, off the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_grpc.protocol.faults import Fault, Quota, Reason, bad_request
from pd_grpc.protocol.messages import sampling_from_proto
from pd_grpc.protocol.sampling import FieldError, StructuredOutput, sampling_errors
from pd_grpc.v1 import sampling_pb2

if TYPE_CHECKING:  # The library is there with the engine that uses it.
    from pd_grpc.engine.grammar import Grammar, Grammars
    from pd_grpc.engine.grammar_trial import Trials

MAX_WAITING = 64
"""Grammars that may wait to be compiled."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Looked:
    """Why a request cannot be taken in, if so. Whoever holds this holds the request's grammar: it
    is not compiled again as long."""

    fault: Fault | None = None
    grammar: Grammar | None = None


class GrammarCheck:
    """Compiles the grammars of requests, one after another on a thread of its own, and looks on
    another at the output that some bring: one whose grammar is known waits for no other's. For the
    loop that makes it."""

    def __init__(self, grammars: Grammars | None) -> None:
        """`grammars` of an engine; None for one that has none, which refuses such a request
        anyway."""
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "pd-grammar")
        self._of_output = ThreadPoolExecutor(1, "pd-grammar-output")
        self._compiling: dict[StructuredOutput, asyncio.Future[Grammar]] = {}
        self._trials: Trials | None = None
        if grammars is not None:
            from pd_grpc.engine.grammar_trial import Trials

            self._trials = Trials()

    async def look(self, params: sampling_pb2.SamplingParams, output: Sequence[int] = ()) -> Looked:
        """Look at a request's grammar, and whether it allows the `output` that the request has
        already. Of a request that is refused for other reasons nothing is said here."""
        if self._grammars is None or not params.HasField("structured_output"):
            return Looked()
        sampling = sampling_from_proto(params)
        wanted = sampling.structured_output
        if wanted is None or sampling_errors(sampling):
            return Looked()
        from pd_grpc.engine.grammar import GrammarError
        from pd_grpc.engine.grammar_trial import Stopped

        try:
            grammar = self._grammars.known(wanted) or await self._compiled(wanted)
            wrong = await self._output_error(self._grammars, grammar, output)
        except GrammarError as error:
            wrong = wanted.error(str(error))
        except Fault as fault:
            return Looked(fault)
        except Stopped as error:
            return Looked(Fault(Reason.DRAINING, str(error)))
        except RuntimeError as error:
            return Looked(Fault(Reason.ENGINE_ERROR, str(error)))
        return Looked(grammar=grammar) if wrong is None else Looked(bad_request([wrong]))

    def leave(self) -> None:
        """The server leaves: a request that waits for the trial of a grammar hears so at once."""
        if self._trials is not None:
            self._trials.stop()

    async def stop(self) -> None:
        """Leave, wait for what is under way here, and end the threads."""
        self.leave()
        for thread in (self._thread, self._of_output):
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)

    async def _compiled(self, wanted: StructuredOutput) -> Grammar:
        """Once for all who wait for the same. Who leaves does not end it for the others."""
        under_way = self._compiling.get(wanted)
        if under_way is None:
            if len(self._compiling) >= MAX_WAITING:
                raise _full()
            assert self._grammars is not None and self._trials is not None
            loop = asyncio.get_running_loop()
            compile_it = self._grammars.compile
            under_way = loop.run_in_executor(self._thread, compile_it, wanted, self._trials)
            self._compiling[wanted] = under_way
            under_way.add_done_callback(lambda done: self._over(wanted, done))
        return await asyncio.shield(under_way)

    def _over(self, wanted: StructuredOutput, done: asyncio.Future[Grammar]) -> None:
        del self._compiling[wanted]
        if not done.cancelled():
            done.exception()  # Perhaps nobody waits for it any more.

    async def _output_error(
        self, grammars: Grammars, grammar: Grammar, output: Sequence[int]
    ) -> FieldError | None:
        if not output:
            return None
        loop = asyncio.get_running_loop()
        fits = await loop.run_in_executor(self._of_output, grammars.check_output, grammar, output)
        if fits == len(output):
            return None
        text = "sampling.structured_output does not allow it"
        return FieldError(f"generated_token_ids[{fits}]", text)


def _full() -> Fault:
    return Fault(
        Reason.QUEUE_FULL,
        f"{MAX_WAITING} grammars wait to be compiled already",
        retry_after_s=RETRY_AFTER_S,
        quota=Quota(needed=0, free=0),
    )
