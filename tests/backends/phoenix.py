"""Arize Phoenix as a process, and what it has been sent, by its REST interface."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-phoenix" / "bin" / "python"
INSTALLED = ROOT / ".venv-phoenix" / ".installed"
_SERVE = Path(__file__).parent / "phoenix_on_loopback.py"
_START_S = 150.0
_LOOK_S = 0.1


@dataclass(frozen=True)
class BackendSpan:
    """A span as Phoenix gives it out. `parent` is empty when it has none; `status` is OK, ERROR or
    UNSET."""

    name: str
    id: str
    parent: str
    status: str
    message: str
    attributes: dict[str, Any]
    events: tuple[str, ...]


class Phoenix:
    """Listens on loopback alone and keeps all it has in `folder`; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "phoenix.log"
        self._page, grpc_port = _free_ports(2)
        self.otlp = f"127.0.0.1:{grpc_port}"
        """host:port for OTLP over gRPC."""
        self.url = f"http://127.0.0.1:{self._page}"
        """Of the page."""
        self._environ = {
            "PHOENIX_WORKING_DIR": str(folder),
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(self._page),
            "PHOENIX_GRPC_PORT": str(grpc_port),
            # It would tell its makers how it is used, load from elsewhere and offer an assistant.
            "PHOENIX_TELEMETRY_ENABLED": "false",
            "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
            "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
        }

    def __enter__(self) -> Phoenix:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # -I: this very file would be found in the place of the package.
                [str(PYTHON), "-I", str(_SERVE)],
                env={**os.environ, **self._environ},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + _START_S
        while not self._answers():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > until:
                self._end()
                raise RuntimeError(f"Phoenix does not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(_LOOK_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def trace(self, trace_id: str) -> dict[str, BackendSpan]:
        """The spans that it has of a trace, by their ids."""
        asked = urllib.parse.urlencode({"trace_id": trace_id, "limit": 1000})
        answer = self._get(f"/v1/projects/default/spans?{asked}")
        spans = [
            BackendSpan(
                name=each["name"],
                id=each["context"]["span_id"],
                parent=each["parent_id"] or "",
                status=each["status_code"],
                message=each["status_message"],
                attributes=each["attributes"],
                events=tuple(event["name"] for event in each["events"]),
            )
            for each in answer["data"]
        ]
        return {span.id: span for span in spans}

    def holds(self, text: str) -> bool:
        """Whether this text is anywhere in what it keeps."""
        files = [each for each in self._folder.rglob("*") if each.is_file()]
        return any(text.encode() in each.read_bytes() for each in files)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return json.load(answer)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
