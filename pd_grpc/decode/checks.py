"""What D refuses before it costs a block: malformed requests, requests too large, unlike legs."""

from __future__ import annotations

from dataclasses import dataclass

from pd_grpc.blocks.pool import blocks_for
from pd_grpc.decode.transfer import ClientLeg, Transfer
from pd_grpc.protocol.block_hashes import HASH_BYTES
from pd_grpc.protocol.config import EngineConfig
from pd_grpc.protocol.faults import Fault, Reason, bad_request, not_meant
from pd_grpc.protocol.messages import (
    lacking_feature,
    prompt_digest,
    sampling_from_proto,
    scope_errors,
    token_errors,
    unbuilt_sampling,
    unbuilt_scope,
)
from pd_grpc.protocol.refs import name_errors, ref_errors
from pd_grpc.protocol.sampling import FieldError, Sampling, sampling_errors, vocabulary_errors
from pd_grpc.v1 import decode_pb2, inference_pb2, sampling_pb2, types_pb2

DIGEST_BYTES = 32


@dataclass(frozen=True)
class Limits:
    """What this D takes: tokens of prompt plus output, vocabulary, blocks, sampling features."""

    instance: types_pb2.Instance
    max_model_len: int
    vocab_size: int
    total_blocks: int
    block_size: int
    features: frozenset[str]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return blocks_for(tokens, self.block_size)


def limits_of(
    config: EngineConfig,
    instance: types_pb2.Instance,
    max_model_len: int,
    vocab_size: int,
    total_blocks: int,
    features: frozenset[str],
) -> Limits:
    """The limits of a D with this engine and pool."""
    return Limits(instance, max_model_len, vocab_size, total_blocks, config.block_size, features)


def draining() -> Fault:
    """This D takes nothing new."""
    return Fault(Reason.DRAINING, "this decode instance drains and takes nothing new")


def check_ref(ref: types_pb2.TransferRef, here: types_pb2.Instance, any_epoch: bool) -> None:
    """Fault when a ref is malformed or means another incarnation of this D."""
    wrong = ref_errors(ref)
    if wrong:
        raise bad_request(wrong)
    if ref.decode_epoch != here.epoch and not (any_epoch and ref.decode_epoch == 0):
        text = f"the transfer means another process of {here.name}"
        raise not_meant(Reason.STALE_EPOCH, text, ref.decode_epoch, here.epoch)


def check_features(
    sampling: sampling_pb2.SamplingParams,
    scope: sampling_pb2.RequestScope,
    features: frozenset[str],
) -> None:
    """Fault when a request needs what is not built here."""
    unbuilt = (
        unbuilt_sampling(sampling) or unbuilt_scope(scope) or lacking_feature(sampling, features)
    )
    if unbuilt is not None:
        raise Fault(Reason.FEATURE, f"{unbuilt} is not supported", {"feature": unbuilt})


def check_allocate(
    request: decode_pb2.AllocateRequest, limits: Limits, negotiated: frozenset[str]
) -> None:
    """Fault when an Allocate is malformed, could never be granted, or needs a feature that its
    session has not."""
    check_features(request.sampling, request.scope, negotiated)
    sampling = sampling_from_proto(request.sampling)
    wrong = sampling_errors(sampling) + vocabulary_errors(sampling, limits.vocab_size)
    wrong += name_errors(request.request_id, "request_id")
    if request.prompt_tokens < 1:
        wrong.append(FieldError("prompt_tokens", "must be at least 1"))
    if request.max_new_tokens < 1:
        wrong.append(FieldError("max_new_tokens", "must be at least 1"))
    if len(request.prompt_digest) != DIGEST_BYTES:
        wrong.append(FieldError("prompt_digest", f"must have {DIGEST_BYTES} bytes"))
    whole = request.prompt_tokens // limits.block_size
    if len(request.block_hashes) > whole:
        limit = f"has {len(request.block_hashes)}; the prompt has {whole} whole blocks"
        wrong.append(FieldError("block_hashes", limit))
    elif any(len(each.hash) != HASH_BYTES for each in request.block_hashes):
        wrong.append(FieldError("block_hashes", f"each has {HASH_BYTES} bytes"))
    elif len({each.hash for each in request.block_hashes}) != len(request.block_hashes):
        # No chain comes to one name twice, and no block is granted twice.
        wrong.append(FieldError("block_hashes", "must differ from each other"))
    wrong += scope_errors(request.scope)
    if wrong:
        raise bad_request(wrong)
    prompt, new = request.prompt_tokens, request.max_new_tokens
    check_length(prompt, new, limits, "prompt_tokens")
    if request.kv_needed:
        check_blocks(prompt + new, limits)


def first_logprobs_errors(
    token: decode_pb2.FirstToken, sampling: sampling_pb2.SamplingParams
) -> list[FieldError]:
    """What the client asked for and the first token has not: it cannot be computed here."""
    if not sampling.HasField("logprobs"):
        return []
    path, given = "tokens[0].logprobs", token.logprobs
    if not given.HasField("chosen") or given.chosen.token_id != token.token_id:
        return [FieldError(f"{path}.chosen", "must be that of the token: sampling asks for it")]
    if len(given.top) != sampling.logprobs:
        limit = f"must have {sampling.logprobs} tokens, as sampling asks for"
        return [FieldError(f"{path}.top", limit)]
    return []


def check_length(prompt: int, new: int, limits: Limits, field: str) -> None:
    """Fault when a prompt, or a prompt with its output, is longer than the model takes."""
    if prompt >= limits.max_model_len:
        text = f"has {prompt} tokens; the model takes at most {limits.max_model_len - 1}"
        raise bad_request([FieldError(field, text)])
    if prompt + new > limits.max_model_len:
        raise _too_large(prompt + new, limits.max_model_len, "tokens")


def check_blocks(tokens: int, limits: Limits) -> None:
    """Fault when an empty pool could not hold so many tokens."""
    needed = limits.blocks_for(tokens)
    if needed > limits.total_blocks:
        raise _too_large(needed, limits.total_blocks, "blocks")


def _too_large(needed: int, total: int, unit: str) -> Fault:
    return Fault(
        Reason.TOO_LARGE,
        f"prompt plus max_tokens needs {needed} {unit}; there are {total}",
        {"needed": str(needed), "total": str(total), "unit": unit},
    )


def check_generate(request: inference_pb2.GenerateRequest, limits: Limits) -> Sampling:
    """The sampling of a client's leg. Fault when the leg is malformed."""
    check_features(request.sampling, request.scope, limits.features)
    sampling = sampling_from_proto(request.sampling)
    wrong = sampling_errors(sampling) + vocabulary_errors(sampling, limits.vocab_size)
    wrong += name_errors(request.request_id, "request_id")
    wrong += scope_errors(request.scope)
    kind = request.WhichOneof("prompt")
    if kind in ("text", "messages"):
        text = "text and messages are the router's to read; a decode instance takes token_ids"
        wrong.append(FieldError(kind, text))
    elif not request.token_ids.ids:
        wrong.append(FieldError("token_ids", "must have at least one token"))
    wrong += token_errors(request.token_ids.ids, limits.vocab_size, "token_ids.ids")
    wrong += token_errors(request.generated_token_ids, limits.vocab_size, "generated_token_ids")
    if len(request.generated_token_ids) >= max(1, sampling.max_tokens):
        wrong.append(FieldError("generated_token_ids", "must be fewer than sampling.max_tokens"))
    if wrong:
        raise bad_request(wrong)
    done = len(request.generated_token_ids)
    prompt, new = len(request.token_ids.ids) + done, sampling.max_tokens - done
    check_length(prompt, new, limits, "token_ids")
    # One token is P's own, and needs no KV here.
    if new > 1 or not request.HasField("handoff"):
        check_blocks(prompt + new, limits)
    return sampling


def check_handoff(request: inference_pb2.GenerateRequest, here: types_pb2.Instance) -> None:
    """Fault when the client's leg of a hand-over means another D."""
    name = request.handoff.decode_name
    if name and name != here.name:
        text = f"this is {here.name}, not {name}"
        raise not_meant(Reason.WRONG_INSTANCE, text, name, here.name)
    check_ref(request.handoff.ref, here, any_epoch=True)


def legs_differ(transfer: Transfer) -> Fault | None:
    """The fault when P's leg and the client's do not mean the same request."""
    if transfer.prefill is None or transfer.client is None:
        return None
    return unlike(transfer.prefill.request, transfer.client)


def unlike(allocate: decode_pb2.AllocateRequest, client: ClientLeg) -> Fault | None:
    """In which part an Allocate and a client's leg differ, if they do."""
    tokens = client.prompt + client.generated
    parts = {
        "prompt_tokens": allocate.prompt_tokens == len(tokens),
        "prompt_digest": allocate.prompt_digest == prompt_digest(tokens),
        "sampling": sampling_from_proto(allocate.sampling) == client.sampling,
        "max_new_tokens": allocate.max_new_tokens
        == client.sampling.max_tokens - len(client.generated),
        "scope.cache_salt": allocate.scope.cache_salt == client.chain.salt,
    }
    if all(parts.values()):
        # Of the same tokens, so that there are as many whole blocks.
        told = [each.hash for each in allocate.block_hashes]
        parts["block_hashes"] = told == client.chain.names(tokens, len(told))
    for part, same in parts.items():
        if not same:
            return Fault(
                Reason.HANDOFF_MISMATCH,
                f"the prefill's and the client's request differ in {part}",
                {"part": part},
            )
    return None
