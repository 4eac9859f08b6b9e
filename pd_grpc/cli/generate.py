"""`pd-grpc generate`: one answer, streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import typer

from pd_grpc.cli import trace
from pd_grpc.cli.console import EXIT_FAILED, Endpoint, describe, refuse, say_error
from pd_grpc.client import Answer, Client, Fault, Generation, Options, RequestError, TransportFault
from pd_grpc.v1 import admin_pb2

_STOP: list[str] = typer.Option([], help="A string that ends the answer; may be repeated.")

EXIT_INTERRUPTED = 130

# What the user calls an argument of the client's.
_GIVEN_AS = {"text": "the prompt", "messages": "the prompt", "timeout_s": "--deadline"}


def generate(
    text: str = typer.Argument(..., help="The prompt."),
    endpoint: str = Endpoint,
    max_tokens: int = typer.Option(0, help="Most tokens of the answer; 0 is the router's default."),
    min_tokens: int = typer.Option(0, help="Fewest tokens of the answer."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_p: float | None = typer.Option(None, help="Nucleus sampling."),
    top_k: int = typer.Option(0, help="Only the k likeliest tokens; 0 is off."),
    seed: int | None = typer.Option(None, help="Seed; without one the router mints it."),
    stop: list[str] = _STOP,
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on at end of sequence."),
    cache_salt: str = typer.Option(
        "", help="Share KV in prefix caches only with requests of the same salt."
    ),
    raw: bool = typer.Option(
        False, "--raw/--chat", help="The plain text, or a chat message (the default)."
    ),
    deadline: float | None = typer.Option(None, help="Seconds the answer may take."),
    with_trace: bool = typer.Option(
        False, "--trace", help="Show where the time went; of servers with --traces-kept."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object at the end."),
) -> None:
    """Ask for an answer and stream it."""
    options: Options = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "stop": stop,
        "ignore_eos": ignore_eos,
    }
    if top_p is not None:
        options["top_p"] = top_p
    if seed is not None:
        options["seed"] = seed
    if cache_salt:
        options["cache_salt"] = cache_salt.encode()
    if not text:
        refuse("the prompt is empty")
    prompt: dict[str, Any] = {"text": text} if raw else {"messages": [("user", text)]}
    trace_id = ""
    try:
        with (
            Client(endpoint) as client,
            client.generate(**prompt, timeout_s=deadline, **options) as generation,
        ):
            trace_id = generation.trace_id
            answer = _stream(generation, quiet=as_json)
    except (Fault, TransportFault) as error:
        say_error(describe(error, endpoint))
        if isinstance(error, Fault):  # Somebody has heard of it.
            say_error(f"its trace is {trace_id}")
        if with_trace and trace_id and not as_json:
            _show_trace(endpoint, trace_id)
        raise typer.Exit(EXIT_FAILED) from error
    except RequestError as error:
        named = _GIVEN_AS.get(error.field, "--" + error.field.replace("_", "-"))
        refuse(f"{named} {error.message}")
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        spans = trace.fetch_answered(endpoint, trace_id)
        found = as_object(answer, generation, spans)
        if with_trace:
            found["spans"] = trace.as_objects(spans)
        print(json.dumps(found, ensure_ascii=False))
    elif with_trace:
        _show_trace(endpoint, trace_id)


def as_object(
    answer: Answer, generation: Generation, spans: Sequence[admin_pb2.Span]
) -> dict[str, Any]:
    """What `--json` prints; times in milliseconds. Of servers that keep no traces `waterfall` is
    empty."""
    end = answer.end
    assert end is not None, "an answer without a last message ends with an error"
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": end.finish_reason,
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "cached_tokens": end.cached_tokens,
        },
        "timings": {name: round(value, 3) for name, value in end.timings_ms.items()},
        "waterfall": trace.waterfall(spans),
        "prefill_instance": end.prefill_instance,
        "decode_instance": end.decode_instance,
        "request_id": generation.request_id,
        "trace_id": generation.trace_id,
    }


def _show_trace(endpoint: str, trace_id: str) -> None:
    """Where the time went; a word, where the servers do not tell."""
    if spans := trace.fetch_answered(endpoint, trace_id):
        trace.show(spans)


def _stream(generation: Generation, quiet: bool) -> Answer:
    answer = Answer()
    begun = False
    try:
        for chunk in generation:
            answer.add(chunk)
            if chunk.text and not quiet:
                begun = True
                print(chunk.text, end="", flush=True)
    finally:
        if begun:
            print(flush=True)
    sys.stdout.flush()
    return answer
