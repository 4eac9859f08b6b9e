"""`pd-grpc generate`: an answer, or several to one prompt, streamed."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from pd_grpc.cli import logprobs as log_probabilities
from pd_grpc.cli import trace
from pd_grpc.cli.console import EXIT_FAILED, Endpoint, describe, refuse, say_error
from pd_grpc.client import Answer, Client, Fault, Generation, Options, RequestError, TransportFault
from pd_grpc.protocol.sampling import MAX_TOP_LOGPROBS
from pd_grpc.v1 import admin_pb2

_STOP: list[str] = typer.Option([], help="A string that ends the answer; may be repeated.")

_STOP_ID: list[int] = typer.Option(
    [], "--stop-token-id", help="Id of a token that ends the answer; may be repeated."
)

_BIAS: list[str] = typer.Option(
    [], help="ID=BIAS adds to the logit of a token, -100 to 100; may be repeated."
)

_SCHEMA: Path | None = typer.Option(
    None, help="File with a JSON schema that the answer follows; - is standard input."
)

EXIT_INTERRUPTED = 130

# What the user calls an argument of the client's.
_GIVEN_AS = {
    "text": "the prompt",
    "messages": "the prompt",
    "timeout_s": "--deadline",
    "stop_token_ids": "--stop-token-id",
}


def generate(
    text: str = typer.Argument(..., help="The prompt."),
    endpoint: str = Endpoint,
    max_tokens: int = typer.Option(0, help="Most tokens of the answer; 0 is the router's default."),
    min_tokens: int = typer.Option(0, help="Fewest tokens of the answer."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    top_p: float | None = typer.Option(None, help="Nucleus sampling."),
    top_k: int = typer.Option(0, help="Only the k likeliest tokens; 0 is off."),
    min_p: float = typer.Option(
        0.0, help="Only tokens at least so likely, as a fraction of the likeliest; 0 is off."
    ),
    presence_penalty: float = typer.Option(
        0.0, help="Against tokens that stand in the answer; -2 to 2, 0 is off."
    ),
    frequency_penalty: float = typer.Option(
        0.0, help="The same, each time that they stand there; -2 to 2, 0 is off."
    ),
    repetition_penalty: float = typer.Option(
        1.0, help="Factor against tokens that stand in prompt or answer; 1 is off."
    ),
    logit_bias: list[str] = _BIAS,
    json_schema: Path | None = _SCHEMA,
    regex: str | None = typer.Option(
        None, help="Regular expression that the whole answer matches."
    ),
    seed: int | None = typer.Option(None, help="Seed; without one the router mints it."),
    n: int = typer.Option(
        1, "--n", "-n", min=1, help="Answers to the prompt; without a temperature they are equal."
    ),
    stop: list[str] = _STOP,
    stop_token_id: list[int] = _STOP_ID,
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on at end of sequence."),
    logprobs: bool = typer.Option(
        False, "--logprobs", help="Show the log-probability of each token."
    ),
    top_logprobs: int | None = typer.Option(
        None,
        min=0,
        max=MAX_TOP_LOGPROBS,
        help="The same, and that of so many of the likeliest tokens in its place.",
    ),
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
        "n": n,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": dict(_bias(each) for each in logit_bias),
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "ignore_eos": ignore_eos,
    }
    if top_p is not None:
        options["top_p"] = top_p
    if seed is not None:
        options["seed"] = seed
    if logprobs or top_logprobs is not None:
        options["logprobs"] = top_logprobs or 0
    if json_schema is not None and regex is not None:
        refuse("--regex cannot be given beside --json-schema")
    if json_schema is not None:
        options["json_schema"] = _schema(json_schema)
    if regex is not None:
        options["regex"] = regex
    if cache_salt:
        options["cache_salt"] = os.fsencode(cache_salt)
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
            answers = _stream(generation, n > 1, quiet=as_json)
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
        found = as_object(answers, generation, spans)
        if with_trace:
            found["spans"] = trace.as_objects(spans)
        print(json.dumps(found, ensure_ascii=False))
        return
    if "logprobs" in options:
        print(*log_probabilities.as_lines(answers), sep="\n")
    if with_trace:
        _show_trace(endpoint, trace_id)


def _schema(file: Path) -> str:
    try:
        with open(0 if str(file) == "-" else file, encoding="utf-8") as given:
            return given.read()
    except OSError as error:
        refuse(f"--json-schema {file} cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        refuse(f"--json-schema {file} cannot be read: {error}")


def _bias(given: str) -> tuple[int, float]:
    token_id, _, bias = given.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        refuse(f"--logit-bias must be ID=BIAS, such as 42=-1.5, not {given}")


def as_object(
    answers: Sequence[Answer], generation: Generation, spans: Sequence[admin_pb2.Span]
) -> dict[str, Any]:
    """What `--json` prints; times in milliseconds. Of servers that keep no traces `waterfall` is
    empty, and so is `logprobs` where none were asked for. Where several answers were asked for they
    are in `choices`, and `usage` is of all."""
    of_each = [_answer_as_object(answer) for answer in answers]
    found = of_each[0]
    if len(of_each) > 1:
        totals = [answer.end.total for answer in answers if answer.end and answer.end.total]
        found = {"choices": of_each, "usage": asdict(totals[-1])}
    return {
        **found,
        "waterfall": trace.waterfall(spans),
        "request_id": generation.request_id,
        "trace_id": generation.trace_id,
    }


def _answer_as_object(answer: Answer) -> dict[str, Any]:
    end = answer.end
    assert end is not None, "an answer without a last message ends with an error"
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "logprobs": log_probabilities.as_objects(answer),
        "finish_reason": end.finish_reason,
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "cached_tokens": end.cached_tokens,
        },
        "timings": {name: round(value, 3) for name, value in end.timings_ms.items()},
        "prefill_instance": end.prefill_instance,
        "decode_instance": end.decode_instance,
    }


def _show_trace(endpoint: str, trace_id: str) -> None:
    """Where the time went; a word, where the servers do not tell."""
    if spans := trace.fetch_answered(endpoint, trace_id):
        trace.show(spans)


def _stream(generation: Generation, several: bool, quiet: bool) -> list[Answer]:
    answers: defaultdict[int, Answer] = defaultdict(Answer)
    shown = _Shown(answers, several)
    try:
        for chunk in generation:
            answers[chunk.choice].add(chunk)
            if not quiet:
                shown.catch_up()
    finally:
        shown.end_line()
    return [answers[choice] for choice in sorted(answers)]


class _Shown:
    """What of the answers stands on standard output. One is shown as it comes; the next ones wait
    until it is complete. Of several each begins a line with its number."""

    def __init__(self, answers: Mapping[int, Answer], several: bool) -> None:
        self._answers = answers
        self._several = several
        self._at = 0
        self._chars = 0
        self._line = False
        """Whether a line has begun."""

    def catch_up(self) -> None:
        """Print what is new."""
        while (answer := self._answers.get(self._at)) is not None:
            text = answer.text[self._chars :]
            if self._several and not self._line and (text or answer.end):
                text = f"[{self._at}] {text}"
            if text:
                print(text, end="", flush=True)
                self._line = True
            self._chars = len(answer.text)
            if answer.end is None:
                break
            if self._several:
                self.end_line()
            self._at, self._chars = self._at + 1, 0

    def end_line(self) -> None:
        """End the line that has begun, if any."""
        if self._line:
            print(flush=True)
        self._line = False
        sys.stdout.flush()
