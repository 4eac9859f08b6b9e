"""How systems of this kind talk today: pickled dicts over ZeroMQ.

This is what the benchmark compares with, and nothing else here may use it: unpickling runs whatever
code a message names. Both ends are processes that the benchmark has started itself, on loopback,
for as long as it runs.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

from pd_grpc.v1 import decode_pb2

LOOPBACK = "tcp://127.0.0.1"


class MissingExtra(RuntimeError):
    """A package that only the benchmark needs is not installed; the message says how to get it."""


def load(module: str) -> Any:
    """A module of the `bench` extra, or what the torch engine needs. MissingExtra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = "all" if module in ("torch", "transformers") else "bench"
        raise MissingExtra(
            f"{module} is not installed; the benchmark needs `pip install pd-grpc[{extra}]`"
        ) from error


def pack_request(number: int, request: decode_pb2.AllocateRequest) -> bytes:
    """An Allocate as a pickled dict."""
    fields = {
        "id": number,
        "method": "allocate",
        "session_id": request.session_id,
        "transfer_id": request.ref.transfer_id,
        "attempt": request.ref.attempt,
        "decode_epoch": request.ref.decode_epoch,
        "prompt_tokens": request.prompt_tokens,
        "max_new_tokens": request.max_new_tokens,
        "prompt_digest": request.prompt_digest,
        "sampling": request.sampling.SerializeToString(),
        "max_wait_s": request.max_wait.ToNanoseconds() / 1e9,
        "budget_s": request.budget.ToNanoseconds() / 1e9,
        "kv_needed": request.kv_needed,
        "request_id": request.request_id,
    }
    return pickle.dumps(fields)


def unpack_request(message: bytes) -> tuple[int, decode_pb2.AllocateRequest]:
    """The number and the Allocate of a pickled dict."""
    fields = pickle.loads(message)
    request = decode_pb2.AllocateRequest(
        session_id=fields["session_id"],
        prompt_tokens=fields["prompt_tokens"],
        max_new_tokens=fields["max_new_tokens"],
        prompt_digest=fields["prompt_digest"],
        kv_needed=fields["kv_needed"],
        request_id=fields["request_id"],
    )
    request.ref.transfer_id = fields["transfer_id"]
    request.ref.attempt = fields["attempt"]
    request.ref.decode_epoch = fields["decode_epoch"]
    request.sampling.ParseFromString(fields["sampling"])
    request.max_wait.FromNanoseconds(round(fields["max_wait_s"] * 1e9))
    request.budget.FromNanoseconds(round(fields["budget_s"] * 1e9))
    return fields["id"], request


def pack_answer(number: int, answer: decode_pb2.AllocateResponse | bytes) -> bytes:
    """A grant, or a status in bytes, as a pickled dict."""
    granted = isinstance(answer, decode_pb2.AllocateResponse)
    body = answer.SerializeToString() if isinstance(answer, decode_pb2.AllocateResponse) else answer
    return pickle.dumps({"id": number, "granted": granted, "body": body})


def unpack_answer(message: bytes) -> tuple[int, decode_pb2.AllocateResponse | bytes]:
    """The number, and the grant or the status in bytes."""
    fields = pickle.loads(message)
    body = fields["body"]
    if fields["granted"]:
        return fields["id"], decode_pb2.AllocateResponse.FromString(body)
    return fields["id"], body
