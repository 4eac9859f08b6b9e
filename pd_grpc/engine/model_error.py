"""What is wrong with a model or with the sizes asked of it, found before a server is ready."""

from __future__ import annotations


class ModelError(Exception):
    """The engine cannot be loaded as configured.

    `field` is the configuration field at fault (`model`, `device`, `chunk_tokens` and so on);
    `message` says what is wrong with it and what is allowed.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
