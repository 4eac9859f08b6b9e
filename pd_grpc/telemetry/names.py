"""The names of spans, events, attributes and metrics, in one place: some conventions still move."""

from __future__ import annotations

from typing import Final

# On the router.
SPAN_REQUEST: Final = "pd.request"
SPAN_ROUTE: Final = "pd.route"
# One for each choice of a request for several, in whose place it stands for the transfer it is.
SPAN_CHOICE: Final = "pd.choice"
ROUTERS_OWN: Final = (SPAN_REQUEST, SPAN_CHOICE)
# On P. `pd.queue` ... `pd.first_token` are children of `pd.prefill_request`, `pd.allocate` of
# `pd.prepare`.
SPAN_PREFILL_REQUEST: Final = "pd.prefill_request"
SPAN_QUEUE: Final = "pd.queue"
SPAN_PREPARE: Final = "pd.prepare"
SPAN_ALLOCATE: Final = "pd.allocate"
SPAN_COMPUTE: Final = "pd.compute"
SPAN_SEND: Final = "pd.send"
SPAN_FIRST_TOKEN: Final = "pd.first_token"
# On D; where it prefills a request itself, `pd.queue` and `pd.compute` too. `pd.decode` is linked
# to the `pd.step` batches it shared, and `pd.step_wait` is its wait for the first of them.
SPAN_RESERVE: Final = "pd.reserve"
SPAN_RECEIVE: Final = "pd.receive"
SPAN_DECODE: Final = "pd.decode"
SPAN_STEP_WAIT: Final = "pd.step_wait"
SPAN_STEP: Final = "pd.step"

# `pd.compute` has one per chunk, `pd.send` one per acknowledged range.
EVENT_CHUNK: Final = "pd.chunk"
EVENT_ACK: Final = "pd.ack"
# When these left for the client: on `pd.request` by the router's clock; by D's on `pd.receive`,
# where KV is still to come then, or on `pd.decode`.
EVENT_FIRST_TOKEN: Final = "pd.first_token"
EVENT_SECOND_TOKEN: Final = "pd.second_token"
# `pd.request` has one for each attempt after the first.
EVENT_RECOVERY: Final = "pd.recovery"

# Whose work it is: on every span that belongs to a request.
ATTR_TRANSFER_ID: Final = "pd.transfer_id"
ATTR_ATTEMPT: Final = "pd.attempt"
ATTR_REQUEST_ID: Final = "pd.request_id"
# How it ended: "ok" or the reason of the fault; on every span.
ATTR_OUTCOME: Final = "pd.outcome"
# Who did it: on every span, beside the resource, so that one process may play several roles.
ATTR_INSTANCE: Final = "pd.instance"
ATTR_ROLE: Final = "pd.role"
# Of a span that failed: the reason, and the code it travelled with.
ATTR_ERROR_TYPE: Final = "error.type"
ATTR_STATUS_CODE: Final = "rpc.response.status_code"

# Of calls, by OpenTelemetry's conventions for RPC; their spans are named after the method.
ATTR_RPC_SYSTEM: Final = "rpc.system.name"
ATTR_RPC_METHOD: Final = "rpc.method"
ATTR_SERVER_ADDRESS: Final = "server.address"
ATTR_SERVER_PORT: Final = "server.port"
METRIC_RPC_CLIENT_DURATION: Final = "rpc.client.call.duration"
METRIC_RPC_SERVER_DURATION: Final = "rpc.server.call.duration"

# Of `pd.choice`: which, from 0.
ATTR_CHOICE: Final = "pd.choice.index"

# Of `pd.recovery`: "retry" or "continuation".
ATTR_RECOVERY: Final = "pd.recovery.kind"
ATTR_PEER: Final = "pd.peer"
# Of `pd.request`: who has it, or had it last.
ATTR_PREFILL: Final = "pd.prefill"
ATTR_DECODE: Final = "pd.decode"
# Of `pd.request` at its end: tokens that were sent to the client.
ATTR_OUTPUT_TOKENS: Final = "pd.output_tokens"
ATTR_PROMPT_TOKENS: Final = "pd.prompt_tokens"
ATTR_GENERATED_TOKENS: Final = "pd.generated_tokens"
ATTR_TOKENS: Final = "pd.tokens"
# Of `pd.allocate`: leading tokens of the prompt whose KV D had.
ATTR_CACHED_TOKENS: Final = "pd.cached_tokens"
ATTR_BATCH: Final = "pd.batch"
ATTR_LAYER_START: Final = "pd.layer_start"
ATTR_LAYER_COUNT: Final = "pd.layer_count"
ATTR_BLOCK_START: Final = "pd.block_start"
ATTR_BLOCK_COUNT: Final = "pd.block_count"
# Of `pd.send`: from the end of compute to the last acknowledgement, in seconds.
ATTR_EXPOSED_S: Final = "pd.exposed_s"
ATTR_TRANSPORT: Final = "pd.transport"
ATTR_KV_FORMAT: Final = "pd.kv_format"

# P's prepare pool; the first three by D.
METRIC_PREPARE_IN_FLIGHT: Final = "pd.prepare.in_flight"
METRIC_PREPARE_WAITING: Final = "pd.prepare.waiting"
METRIC_PREPARE_BREAKER_OPEN: Final = "pd.prepare.breaker_open"
METRIC_PREPARE_READY: Final = "pd.prepare.ready"
METRIC_PREPARE_WAIT: Final = "pd.prepare.wait"

# The router's tries elsewhere, by what the attempt before had failed with.
METRIC_ROUTER_RETRIES: Final = "pd.router.retries"
METRIC_ROUTER_CONTINUATIONS: Final = "pd.router.continuations"
METRIC_ROUTER_RETRIES_REFUSED: Final = "pd.router.retries_refused"
METRIC_ROUTER_RETRY_BUDGET: Final = "pd.router.retry_budget"

# Of metrics: the reason of a fault.
ATTR_METRIC_REASON: Final = "reason"
# Of metrics: host:port of the D that they are about.
ATTR_METRIC_DECODE: Final = "decode"

# Every instance.
METRIC_STAGE_DURATION: Final = "pd.stage.duration"
METRIC_BLOCKS: Final = "pd.blocks"
METRIC_REFUSALS: Final = "pd.refusals"
METRIC_LEASE_EXPIRED: Final = "pd.lease.expired"
METRIC_LATE_EVENTS: Final = "pd.late_events"
METRIC_QUEUE_TOKENS: Final = "pd.queue.tokens"
METRIC_PREFIX_LOOKUP_TOKENS: Final = "pd.prefix_cache.lookup_tokens"
METRIC_PREFIX_HIT_TOKENS: Final = "pd.prefix_cache.hit_tokens"
METRIC_TRANSFER_BYTES: Final = "pd.transfer.bytes"
METRIC_TRANSFER_DURATION: Final = "pd.transfer.duration"
# P.
METRIC_WASTED_TOKENS: Final = "pd.prefill.wasted_tokens"
# The router.
METRIC_DECISION: Final = "pd.decision"
METRIC_SECOND_TOKEN_GAP: Final = "pd.second_token_gap"
# By OpenTelemetry's conventions for generative AI as of 1.44, which have left for a repository of
# their own and still move. All they require is there; server.address and server.port, which they
# recommend, are one for all series of a router, and its resource names it.
METRIC_TTFT: Final = "gen_ai.server.time_to_first_token"
METRIC_TPOT: Final = "gen_ai.server.time_per_output_token"
METRIC_REQUEST_DURATION: Final = "gen_ai.server.request.duration"
ATTR_GEN_AI_OPERATION: Final = "gen_ai.operation.name"
OPERATION_CHAT: Final = "chat"
OPERATION_COMPLETION: Final = "text_completion"
ATTR_GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
PROVIDER: Final = "pd_grpc"
ATTR_GEN_AI_MODEL: Final = "gen_ai.request.model"

# Labels of metrics.
ATTR_METRIC_STAGE: Final = "stage"
ATTR_METRIC_ROLE: Final = "role"
ATTR_METRIC_TRANSPORT: Final = "transport"
ATTR_METRIC_STATE: Final = "state"
ATTR_METRIC_SIDE: Final = "side"
ATTR_METRIC_DECISION: Final = "decision"
ATTR_METRIC_WHY: Final = "why"
