"""The pd-grpc command with real processes, on the sim engine."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import pytest

from pd_grpc.cli.cluster import ClusterPlan, LocalCluster
from pd_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.cli.running import COMMAND, pd_grpc

PLAN = ClusterPlan(engine="sim", flags=("--num-blocks", "2048"))
LONG = ("--max-tokens", "20000", "--ignore-eos")

pytestmark = pytest.mark.longest


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(PLAN) as running:
        yield running


def status(endpoint: str) -> list[dict[str, Any]]:
    result = pd_grpc("status", "--endpoint", endpoint, "--json")
    assert result.returncode == 0, result.stderr
    instances: list[dict[str, Any]] = json.loads(result.stdout)["instances"]
    return instances


def until_nothing_is_in_flight(cluster: LocalCluster) -> None:
    """Waits on each instance's own changes, as an operator would."""
    for instance in cluster.instances:
        with grpc.insecure_channel(instance.endpoint) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            changes = admin.WatchTransfers(admin_pb2.WatchTransfersRequest(), timeout=60)
            changes.initial_metadata()
            while admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=60).transfers:
                next(changes)
            changes.cancel()


def test_the_version_is_shown() -> None:
    result = pd_grpc("--version")
    assert (result.returncode, result.stdout) == (0, f"pd-grpc {metadata.version('pd-grpc')}\n")


# --- generate -------------------------------------------------------------------------------------


def test_generate_streams_the_text_of_the_answer(cluster: LocalCluster) -> None:
    result = pd_grpc("generate", "hi", "--endpoint", cluster.router_endpoint, "--max-tokens", "3")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"( w\d+){1,3}\n", result.stdout)
    assert result.stderr == ""


def test_generate_json_prints_one_object_with_everything(cluster: LocalCluster) -> None:
    result = pd_grpc(
        "generate", "hi", "--endpoint", cluster.router_endpoint, "--max-tokens", "3", "--json"
    )
    answer = json.loads(result.stdout)
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 3
    assert answer["text"].count(" w") <= 3
    assert answer["finish_reason"] in ("stop", "length")
    assert set(answer["timings"]) == {
        "route",
        "queue",
        "prepare",
        "allocate",
        "compute",
        "first_token",
        "exposed_send",
        "total",
    }
    assert answer["timings"]["compute"] > 0
    assert (answer["prefill_instance"], answer["decode_instance"]) == ("prefill-0", "decode-0")
    assert re.fullmatch("[0-9a-f]{32}", answer["trace_id"])


def test_generate_takes_plain_text_and_the_endpoint_from_the_environment(
    cluster: LocalCluster,
) -> None:
    result = pd_grpc(
        "generate",
        "hi",
        "--raw",
        "--json",
        "--max-tokens",
        "1",
        environ={"PD_ENDPOINT": cluster.router_endpoint},
    )
    assert json.loads(result.stdout)["usage"]["prompt_tokens"] == 2


def test_the_same_seed_gives_the_same_answer(cluster: LocalCluster) -> None:
    asked = ("generate", "hi", "--endpoint", cluster.router_endpoint, "--max-tokens", "8")
    sampled = (*asked, "--temperature", "1", "--seed", "5")
    results = [pd_grpc(*arguments) for arguments in (sampled, sampled, asked)]
    assert [result.stderr for result in results] == ["", "", ""]
    first, second, greedy = (result.stdout for result in results)
    assert first == second != greedy


def test_a_stop_token_ends_the_answer_as_its_last_token(cluster: LocalCluster) -> None:
    asked = ("generate", "hi", "--endpoint", cluster.router_endpoint, "--max-tokens", "8", "--json")
    whole = json.loads(pd_grpc(*asked, "--ignore-eos").stdout)["token_ids"]
    stopping = ("--ignore-eos", "--stop-token-id", "0", "--stop-token-id", str(whole[3]))
    answer = json.loads(pd_grpc(*asked, *stopping).stdout)
    assert answer["token_ids"] == whole[: whole.index(whole[3]) + 1]
    assert answer["finish_reason"] == "stop"


def test_several_answers_stand_below_each_other_by_their_numbers(cluster: LocalCluster) -> None:
    where = ("--endpoint", cluster.router_endpoint, "--max-tokens", "4", "--ignore-eos")
    sampled = ("generate", "hi", *where, "--temperature", "1", "--seed", "5", "-n", "3")
    shown, told = pd_grpc(*sampled), pd_grpc(*sampled, "--json")
    assert (shown.returncode, told.returncode) == (0, 0), shown.stderr + told.stderr
    answer = json.loads(told.stdout)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len({*texts}) == 3
    assert shown.stdout == "".join(f"[{i}] {text}\n" for i, text in enumerate(texts))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == answer["choices"][1]["usage"]["prompt_tokens"]
    assert re.fullmatch("[0-9a-f]{32}", answer["trace_id"])


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (["-n", "129"], 1, "INVALID_ARGUMENT BAD_REQUEST: sampling.n: must be at most 128"),
        (["-n", "0"], 2, "--n"),
        (["--top-k", "-1"], 1, "INVALID_ARGUMENT BAD_REQUEST: sampling.top_k: must be"),
        (["--temperature", "nan"], 1, "INVALID_ARGUMENT BAD_REQUEST: sampling.temperature"),
        (["--max-tokens", "100000000"], 1, "INVALID_ARGUMENT TOO_LARGE: "),
        # The router says it or, where that is late, the call itself.
        (["--deadline", "0.05"], 1, "DEADLINE_EXCEEDED"),
        (["--min-p", "0.5"], 1, "UNIMPLEMENTED FEATURE: sampling.min_p"),
        (["--repetition-penalty", "0"], 1, "BAD_REQUEST: sampling.repetition_penalty: must be"),
        (["--presence-penalty", "2.5"], 1, "BAD_REQUEST: sampling.presence_penalty: must be"),
        (["--frequency-penalty", "nan"], 1, "BAD_REQUEST: sampling.frequency_penalty: must be"),
        (["--logit-bias", "3=-1e3"], 1, "BAD_REQUEST: sampling.logit_bias: each bias must be"),
        (["--regex", "[0-9]+"], 1, "UNIMPLEMENTED FEATURE: sampling.structured_output"),
        (["--regex", ""], 1, "sampling.structured_output: regex: must have 1 to 16384 bytes"),
        (["--json-schema", "/dev/null"], 1, "structured_output: json_schema: must have 1 to 65536"),
        (["--json-schema", "none.json"], 2, "--json-schema none.json cannot be read: No such"),
        (["--json-schema", "-", "--regex", "a"], 2, "--regex cannot be given beside --json-schema"),
        (["--logit-bias", "3:1"], 2, "--logit-bias must be ID=BIAS, such as 42=-1.5, not 3:1"),
        (["--logit-bias", "-1=1"], 2, "--logit-bias"),
        (["--seed", "-1"], 2, "--seed must be at least 0, not -1"),
        (["--max-tokens", "-1"], 1, "BAD_REQUEST: sampling.max_tokens: must be at least 1\n"),
        (["--deadline", "-3"], 2, "--deadline must be above 0 and at most 1000000000 seconds"),
        (["--deadline", "nan"], 2, "--deadline must be above 0 and at most 1000000000 seconds"),
        (["--deadline", "0"], 2, "--deadline must be above 0 and at most 1000000000 seconds"),
        (["--stop", "\udcff"], 2, "--stop must be text that UTF-8 can carry"),
        (["--cache-salt", "\udcff" * 65], 1, "BAD_REQUEST: scope.cache_salt: "),
        (["--max-tokens", "many"], 2, "--max-tokens"),
        (["--top-logprobs", "21"], 2, "--top-logprobs"),
        (["--logprobs"], 1, "UNIMPLEMENTED FEATURE: "),
        (["--stop-token-id", "-1"], 2, "--stop-token-id"),
        (["--stop-token-id", "40000"], 1, "BAD_REQUEST: sampling.stop_token_ids"),
        (["--no-such-flag"], 2, "--no-such-flag"),
    ],
)
def test_generate_says_what_is_wrong(
    flags: list[str], status: int, says: str, cluster: LocalCluster
) -> None:
    result = pd_grpc("generate", "hi", "--endpoint", cluster.router_endpoint, *flags)
    assert result.returncode == status, result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_a_schema_from_a_standard_input_that_is_closed_is_refused_in_one_line() -> None:
    flags = ["--endpoint", "127.0.0.1:1", "--json-schema", "-"]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "generate", "hi", *flags]
    result = subprocess.run(closed, capture_output=True, text=True, timeout=150)
    assert result.returncode == 2
    assert re.fullmatch("--json-schema - cannot be read: .*\n", result.stderr)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "the prompt is empty\n"),
        ("caf\udce9", "the prompt must be text that UTF-8 can carry\n"),
    ],
)
@pytest.mark.parametrize("flag", ["--chat", "--raw"])
def test_a_prompt_that_cannot_be_sent_is_refused_in_one_line(
    flag: str, prompt: str, says: str
) -> None:
    result = pd_grpc("generate", prompt, flag, "--endpoint", "127.0.0.1:1")
    assert (result.returncode, result.stderr) == (2, says)


@pytest.mark.parametrize("command", [("generate", "hi"), ("status",)])
@pytest.mark.parametrize("endpoint", ["", "foo", "h:99999999"])
def test_an_endpoint_that_is_none_is_refused_in_one_line(
    command: tuple[str, ...], endpoint: str
) -> None:
    result = pd_grpc(*command, "--endpoint", endpoint)
    assert result.returncode == 2
    assert re.fullmatch(
        rf"--endpoint must (be host:port|have a port) .*, not '{endpoint}'\n", result.stderr
    )


def test_generate_without_a_router_says_so_in_one_line() -> None:
    result = pd_grpc("generate", "hi", "--endpoint", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE: no answer from 127.0.0.1:1")
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_interrupt_ends_the_request_everywhere(cluster: LocalCluster) -> None:
    """F33: a client that leaves in mid-answer frees both sides."""
    asked = ["generate", "hi", "--endpoint", cluster.router_endpoint, *LONG]
    # As a terminal starts it, and not a shell that has it in the background, with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # A pipe that the answer does not fit in: it has not ended when the interrupt comes.
    with subprocess.Popen(
        [*COMMAND, *asked], stdout=subprocess.PIPE, bufsize=0, pipesize=4096
    ) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout is not None
        assert process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 130
    until_nothing_is_in_flight(cluster)
    for instance in status(cluster.router_endpoint):
        assert instance["transfers"] == 0
        if instance["role"] != "router":
            assert instance["blocks"].keys() <= {"free", "cached"}
            assert sum(instance["blocks"].values()) == 2048


# --- status ---------------------------------------------------------------------------------------


def test_status_json_has_every_instance(cluster: LocalCluster) -> None:
    instances = {i["name"]: i for i in status(cluster.router_endpoint)}
    assert instances.keys() == {"router", "prefill-0", "decode-0"}
    for instance in cluster.instances:
        shown = instances[instance.name]
        assert (shown["role"], shown["endpoint"]) == (instance.role, instance.endpoint)
        assert (shown["health"], shown["transfers"]) == ("serving", 0)
        assert shown["epoch"] > 0
    assert sum(instances["decode-0"]["blocks"].values()) == 2048


def test_status_shows_a_table(cluster: LocalCluster) -> None:
    result = pd_grpc("status", "--endpoint", cluster.router_endpoint, environ={"COLUMNS": "160"})
    assert result.returncode == 0
    for word in ("router", "prefill-0", "decode-0", "serving", " free"):
        assert word in result.stdout


def test_status_without_a_router_fails_in_one_line() -> None:
    result = pd_grpc("status", "--endpoint", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE")


# --- serve ----------------------------------------------------------------------------------------


def pd_grpc_without(modules: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where these modules cannot be imported."""
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({modules.split()!r}))\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "from pd_grpc.cli.main import app\napp()"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_serve_help_needs_nothing_but_the_core(role: str) -> None:
    extras = "torch transformers numpy grpc_health grpc_reflection grpc_channelz google_crc32c"
    run = pd_grpc_without(extras, "serve", role, "--help")
    assert run.returncode == 0, run.stderr
    assert "--lease-s" in run.stdout


def test_the_kit_says_what_has_to_be_installed() -> None:
    run = pd_grpc_without("google_crc32c", "conformance", "--decode", "127.0.0.1:9")
    assert run.returncode == 2
    assert "it needs google_crc32c: pip install 'pd-grpc[server]'" in run.stderr


@pytest.mark.parametrize(
    ("missing", "flags", "says"),
    [
        ("grpc_health.v1", [], "it needs grpc_health.v1: pip install 'pd-grpc[all]'"),
        ("opentelemetry.exporter", ["--otlp", "h:1"], "pip install 'pd-grpc[otlp]'"),
    ],
)
def test_serve_says_what_has_to_be_installed(missing: str, flags: list[str], says: str) -> None:
    run = pd_grpc_without(missing, "serve", "router", "--engine", "sim", *flags)
    assert run.returncode == 2
    assert says in run.stderr and len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_serve_help_shows_every_setting(role: str) -> None:
    result = pd_grpc("serve", role, "--help")
    assert result.returncode == 0
    assert "--lease-s" in result.stdout and "PD_LEASE_S" in result.stdout


@pytest.mark.parametrize(
    ("role", "arguments", "says"),
    [
        ("prefill", ["--no-such", "1"], "unknown flag --no-such"),
        ("decode", ["--lease-s", "-1"], "lease_s must be greater than 0"),
        ("router", ["--config", "pd.toml"], "unknown key leese_s in pd.toml"),
    ],
)
def test_serve_refuses_what_it_does_not_know(
    role: str,
    arguments: list[str],
    says: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "pd.toml").write_text("leese_s = 5\n", encoding="utf-8")
    result = pd_grpc("serve", role, *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_serve_says_in_one_line_that_its_port_is_in_use(role: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = pd_grpc("serve", role, "--engine", "sim", "--port", port)
    assert result.returncode == 3
    assert result.stderr.splitlines()[-1] == (
        f"pd-grpc serve {role}: cannot listen on 127.0.0.1:{port}: Address already in use"
    )
    assert "add_port.cc" not in result.stderr and "Traceback" not in result.stderr


def test_serve_prints_one_line_when_ready_and_stops_on_a_signal() -> None:
    command = [*COMMAND, "serve", "router", "--engine", "sim", "--name", "r1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.fullmatch(r"ready router r1 127\.0\.0\.1:\d+\n", line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == ""
