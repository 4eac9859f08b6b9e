"""W3C tracestate: what tracing systems add to a trace context, passed on as it came.

The SDK drops a malformed one too, but says so in the log, in the caller's own words, for each call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

FIELD = "tracestate"
"""The metadata key."""
MOST_CHARS = 512
"""As many as W3C asks everyone to pass on."""
MOST_MEMBERS = 32

_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_KEY = r"[a-z][-_0-9a-z*/]{0,255}|[a-z0-9][-_0-9a-z*/]{0,240}@[a-z][-_0-9a-z*/]{0,13}"
_MEMBER = re.compile(rf"({_KEY})={_VALUE}")


def is_sound(values: Sequence[str]) -> bool:
    """Whether it may be passed on."""
    members = [member.strip(" \t") for value in values for member in value.split(",")]
    matches = [_MEMBER.fullmatch(member) for member in members if member]
    keys = {match[1] for match in matches if match is not None}
    return (
        len(keys) == len(matches) <= MOST_MEMBERS
        and sum(map(len, values)) + len(values) <= MOST_CHARS
    )
