"""Names for what a case makes."""

from __future__ import annotations

import secrets


class Names:
    """Names that nothing else has, neither in another case nor in another run."""

    def __init__(self, case_id: str) -> None:
        self._case = f"{case_id.lower()}-{secrets.token_hex(4)}"
        self._numbers = 0

    def __call__(self, what: str) -> str:
        """The next one, for a thing of this kind."""
        self._numbers += 1
        return f"kit-{self._case}-{what}{self._numbers}"
