"""Finds out in one short question whether the hub has a model, or its cache does.

transformers asks again and again where there is no network, half a minute long and a line each
time; it is not asked for what cannot be had.
"""

from __future__ import annotations

import logging
import ssl
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_source import ModelSource

_ANSWER_S = 10.0
_CONFIG = "config.json"
_REFUSED = (401, 403, 404)


def reach(source: ModelSource) -> ModelSource:
    """`source`, or what the hub's cache has of it where the hub cannot be reached.

    A source that is local already is returned as it is. ModelError when the hub does not have it
    or does not give it out, and when there is neither hub nor cache.
    """
    if source.local:
        return source
    import huggingface_hub
    from huggingface_hub import constants

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(source.location)
    if not why:
        return source
    if isinstance(huggingface_hub.try_to_load_from_cache(source.location, _CONFIG), str):
        return replace(source, local=True)
    raise ModelError("model", f"{source.name} is not in the hub's cache, and {why}")


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Takes no token to another host; that the hub has an answer is answer enough."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _unreachable(model: str) -> str:
    """Why the hub cannot be asked for a model; empty when it can. ModelError when it refuses."""
    from huggingface_hub import get_token, hf_hub_url

    question = urllib.request.Request(hf_hub_url(model, _CONFIG), method="HEAD")
    if token := get_token():
        question.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(_StayHere)
    try:
        with opener.open(question, timeout=_ANSWER_S):
            return ""
    except urllib.error.HTTPError as error:
        if error.code in _REFUSED:
            text = f"the hub has no {model}, or does not give it out without a token"
            raise ModelError("model", f"{text} (HTTP {error.code})") from error
        return ""
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return ""  # transformers has certificates of its own
        why = getattr(reason, "strerror", None) or reason
        return f"the hub cannot be reached: {why}"
