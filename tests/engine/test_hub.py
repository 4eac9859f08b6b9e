"""What is said of a hub name, with a hub of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

REACH = """
from pd_grpc.engine.hub import reach
from pd_grpc.engine.model_error import ModelError
from pd_grpc.engine.model_source import find_model
try:
    print("local" if reach(find_model("nobody/tiny")).local else "hub")
except ModelError as error:
    print(error)
"""
NOBODY = "http://127.0.0.1:1"
UNREACHABLE = "the hub cannot be reached: Connection refused"


def reach(endpoint: str, home: Path) -> str:
    """What becomes of `nobody/tiny`; nothing may be said on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", REACH],
        timeout=50,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "no_proxy": "*"},
    )
    assert done.stderr == ""
    return done.stdout.rstrip("\n")


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[str]:
    """Answers every question with the status it is given."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(request.param)
            self.send_header("Location", NOBODY)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def put_into_cache(home: Path) -> None:
    model = home / "hub" / "models--nobody--tiny"
    revision = "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(revision, encoding="ascii")
    (model / "snapshots" / revision).mkdir(parents=True)
    (model / "snapshots" / revision / "config.json").write_text("{}", encoding="ascii")


@pytest.mark.parametrize("hub", [200, 302, 503], indirect=True)
def test_a_hub_that_answers_is_left_to_transformers(hub: str, tmp_path: Path) -> None:
    assert reach(hub, tmp_path) == "hub"


@pytest.mark.parametrize("hub", [401, 404], indirect=True)
def test_a_model_that_the_hub_refuses_is_said_in_one_line(hub: str, tmp_path: Path) -> None:
    says = "model: the hub has no nobody/tiny, or does not give it out without a token (HTTP 40"
    assert reach(hub, tmp_path).startswith(says)


def test_without_a_hub_the_cache_serves(tmp_path: Path) -> None:
    put_into_cache(tmp_path)
    assert reach(NOBODY, tmp_path) == "local"


def test_without_hub_and_cache_it_is_said_in_one_line(tmp_path: Path) -> None:
    says = f"model: nobody/tiny is not in the hub's cache, and {UNREACHABLE}"
    assert reach(NOBODY, tmp_path) == says
