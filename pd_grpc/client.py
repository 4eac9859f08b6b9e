"""The Python client: asks a router (or a decode instance) for answers.

It needs grpc, protobuf and pydantic, neither torch nor transformers.

    with Client("127.0.0.1:50050") as client:
        for chunk in client.generate("Paris is", max_tokens=20, temperature=0):
            print(chunk.text, end="")

Every request carries a W3C trace context: that of the current OpenTelemetry span, or a new one.
Where the process has OpenTelemetry's SDK, each request is a span of its own there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import grpc
import grpc.aio
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from pd_grpc.protocol import rpc
from pd_grpc.protocol.answers import STAGES, Answer, AnswerEnd, Chunk, Total, chunk_of
from pd_grpc.protocol.choices import choices_of
from pd_grpc.protocol.clock import SystemClock
from pd_grpc.protocol.config import Sizes, Timeouts
from pd_grpc.protocol.faults import Fault, TransportFault
from pd_grpc.protocol.field_values import RequestError
from pd_grpc.protocol.requests import build_request, checked_endpoint, checked_timeout
from pd_grpc.telemetry.instruments import Instruments
from pd_grpc.telemetry.rpc_calls import Call, Calls
from pd_grpc.telemetry.rpc_client import follow, follow_aio, unless_raised
from pd_grpc.telemetry.tracing import Tracing, extract, inject, trace_id
from pd_grpc.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = [
    "STAGES",
    "Answer",
    "AnswerEnd",
    "AsyncClient",
    "AsyncGeneration",
    "Chunk",
    "Client",
    "Fault",
    "Generation",
    "Options",
    "RequestError",
    "Total",
    "TransportFault",
]

_CALL_S = 5.0
_METHOD = "pd_grpc.v1.InferenceService/Generate"


class Options(TypedDict, total=False):
    """What a request may say beside its prompt; see `SamplingParams` for bounds and defaults."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    json_schema: str | Mapping[str, Any]
    regex: str
    n: int
    generated_token_ids: Sequence[int]
    request_id: str
    cache_salt: bytes


class _Stream:
    """What both kinds of generation share: the call, its trace, its name."""

    def __init__(self, call: Any, trace: str, choices: int) -> None:
        self._call = call
        self._choices = choices
        self.trace_id = trace
        """Trace id of the request, 32 hex digits."""
        self.request_id = ""
        """The request's name, known with the first chunk."""

    def cancel(self) -> None:
        """End the request everywhere; nothing happens when it has ended."""
        self._call.cancel()

    def _chunk(self, message: inference_pb2.GenerateResponse) -> Chunk:
        self.request_id = message.request_id or self.request_id
        return chunk_of(message)

    def _expect_one(self) -> None:
        if self._choices > 1:
            raise RequestError("n", "there are several answers: collect_all() gets them")


class Generation(_Stream):
    """An answer as it comes: iterate over its chunks. Leaving the `with` block, an exception such
    as KeyboardInterrupt and the garbage collector end the request everywhere.

    Iterating raises `Fault`, or `TransportFault` where the status is not the project's own.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            return self._chunk(next(self._call))
        except grpc.RpcError as error:
            raise rpc.read_error(error) from error
        except BaseException:
            self.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def collect(self) -> Answer:
        """Wait for the whole answer. RequestError where several were asked for."""
        self._expect_one()
        answer = Answer()
        for chunk in self:
            answer.add(chunk)
        return answer

    def collect_all(self) -> list[Answer]:
        """Wait for every choice, in their order."""
        answers: defaultdict[int, Answer] = defaultdict(Answer)
        for chunk in self:
            answers[chunk.choice].add(chunk)
        return [answers[choice] for choice in sorted(answers)]


class AsyncGeneration(_Stream):
    """An answer as it comes: iterate over its chunks. Leaving the `async with` block, or cancelling
    the task that iterates, ends the request everywhere. Errors as for `Generation`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise rpc.read_error(error) from error
        except BaseException:
            self.cancel()
            raise
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise StopAsyncIteration
        return self._chunk(message)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    async def collect(self) -> Answer:
        """Wait for the whole answer. RequestError where several were asked for."""
        self._expect_one()
        answer = Answer()
        async for chunk in self:
            answer.add(chunk)
        return answer

    async def collect_all(self) -> list[Answer]:
        """Wait for every choice, in their order."""
        answers: defaultdict[int, Answer] = defaultdict(Answer)
        async for chunk in self:
            answers[chunk.choice].add(chunk)
        return [answers[choice] for choice in sorted(answers)]


class Client:
    """A connection to a router, for blocking code; to be closed. Safe from any thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        """`endpoint` is host:port; RequestError if it is not. Spans and durations of its requests
        go to the process's own providers unless there are others."""
        self._channel = rpc.sync_channel(checked_endpoint(endpoint), Timeouts(), Sizes())
        self._record = _Record(endpoint, tracer_provider, meter_provider)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[tuple[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Ask for an answer to plain `text`, to (role, content) `messages` or to `token_ids`.

        `timeout_s` is the request's budget; without one the router's default holds. RequestError
        for what cannot be sent; what can be is the server's to judge.
        """
        timeout_s = checked_timeout(timeout_s)
        request = build_request(text, messages, token_ids, options)
        recorded, metadata, trace = self._record.begin()
        with unless_raised(recorded):
            call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        follow(call, recorded)
        return Generation(call, trace, choices_of(request.sampling))

    def model_info(self, timeout_s: float = _CALL_S) -> inference_pb2.GetModelInfoResponse:
        """What is served. Raises `Fault` or `TransportFault`; RequestError for a time that is
        none."""
        timeout = checked_timeout(timeout_s)
        try:
            request = inference_pb2.GetModelInfoRequest()
            answer: inference_pb2.GetModelInfoResponse = self._stub.GetModelInfo(
                request, timeout=timeout
            )
            return answer
        except grpc.RpcError as error:
            raise rpc.read_error(error) from error

    def close(self) -> None:
        """End every request and the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """A connection to a router, for the running loop; to be closed."""

    def __init__(
        self,
        endpoint: str,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        """`endpoint` is host:port; RequestError if it is not. Spans and durations of its requests
        go to the process's own providers unless there are others."""
        self._channel = rpc.aio_channel(checked_endpoint(endpoint), Timeouts(), Sizes())
        self._record = _Record(endpoint, tracer_provider, meter_provider)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[tuple[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGeneration:
        """Ask for an answer, as `Client.generate` does."""
        timeout_s = checked_timeout(timeout_s)
        request = build_request(text, messages, token_ids, options)
        recorded, metadata, trace = self._record.begin()
        with unless_raised(recorded):
            call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        follow_aio(call, recorded)
        return AsyncGeneration(call, trace, choices_of(request.sampling))

    async def model_info(self, timeout_s: float = _CALL_S) -> inference_pb2.GetModelInfoResponse:
        """What is served. Raises `Fault` or `TransportFault`; RequestError for a time that is
        none."""
        timeout = checked_timeout(timeout_s)
        try:
            request = inference_pb2.GetModelInfoRequest()
            answer: inference_pb2.GetModelInfoResponse = await self._stub.GetModelInfo(
                request, timeout=timeout
            )
            return answer
        except grpc.aio.AioRpcError as error:
            raise rpc.read_error(error) from error

    async def close(self) -> None:
        """End every request and the connection."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class _Record:
    """What is recorded of a client's requests."""

    def __init__(
        self, endpoint: str, tracers: TracerProvider | None, meters: MeterProvider | None
    ) -> None:
        own = trace.get_tracer_provider()
        tracers = tracers or (own if isinstance(own, TracerProvider) else None)
        self._endpoint = endpoint
        self._tracing = Tracing(SystemClock(), "", "client", tracers)
        self._calls = Calls(self._tracing, Instruments("", meters), rpc.reason_in)

    def begin(self) -> tuple[Call, list[tuple[str, Any]], str]:
        """A request begins: its record, the metadata that carries the current trace or a new one,
        and the trace's id."""
        context = otel_context.get_current()
        if not self._tracing.records:
            context = Tracing.context(self._tracing.start(_METHOD, parent=context))
        recorded, metadata = self._calls.made(_METHOD, self._endpoint, inject(context))
        return recorded, list(metadata or ()), trace_id(extract(metadata))
