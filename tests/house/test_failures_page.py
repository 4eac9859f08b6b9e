"""docs/failures.md names what the code has alone, and tells of each failure the same things."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pd_grpc.cli.settings import ROLES, settings_table
from pd_grpc.prefill.server import start_prefill
from pd_grpc.protocol.faults import STATUS_TABLE, Code, Reason, Retry
from pd_grpc.router.server import start_router
from pd_grpc.telemetry import names
from pd_grpc.telemetry.log_events import Event
from pd_grpc.v1 import admin_pb2, layout_pb2, types_pb2
from tests.house.pages import ROOT
from tools.proto_source import read_protos

TEXT = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
ROWS = ["client", "shows", "do"]
ERROR_INFO = {"code", "reason", "transfer_id", "trace_id", "layers", "blocks", "stage"}
"""What a log line or a status carries that is no field of a message."""


def _quoted(pattern: str) -> list[str]:
    """What stands in backticks and has this form."""
    return [word for word in re.findall(r"`([^`\n]+)`", TEXT) if re.fullmatch(pattern, word)]


def _sections() -> Iterator[tuple[str, str]]:
    parts = re.split(r"^### (.+)$", TEXT, flags=re.MULTILINE)
    return zip(parts[1::2], parts[2::2], strict=True)


def test_every_code_and_reason_is_in_the_status_table() -> None:
    words = set(_quoted(r"[A-Z][A-Z_]+"))
    assert len(words & set(Reason.__members__)) > 15
    assert words <= set(Reason.__members__) | set(Code.__members__)


def test_every_reason_is_told_with_the_code_that_the_client_sees() -> None:
    pairs = re.findall(r"`([A-Z_]+)` · `([A-Z_]+)`", TEXT)
    assert len(pairs) > 20
    wrong = [(code, r) for code, r in pairs if STATUS_TABLE[Reason[r]].client is not Code[code]]
    assert wrong == []


def test_what_the_router_takes_elsewhere_is_said_to_be() -> None:
    silent = []
    for title, section in _sections():
        reasons = {Reason[name] for name in re.findall(r"· `([A-Z_]+)`", section)}
        client = section.split("\n| shows |")[0]
        tried = any(STATUS_TABLE[reason].retry is Retry.OTHER for reason in reasons)
        if tried and "elsewhere" not in client.lower():
            silent.append(title)
    assert silent == []


def test_every_metric_and_span_is_one_of_the_code() -> None:
    known = {value for value in vars(names).values() if isinstance(value, str)}
    assert set(_quoted(r"pd\.[a-z._]+")) <= known


def test_every_metric_of_the_router_is_told() -> None:
    metrics = {value for name, value in vars(names).items() if name.startswith("METRIC_ROUTER_")}
    assert metrics and metrics <= set(_quoted(r"pd\.[a-z._]+"))


def test_every_flag_is_there() -> None:
    rows = [row for role in ROLES.values() for row in settings_table(role)]
    flags = {row.flag for row in rows} | {f"--no-{row.flag[2:]}" for row in rows}
    quoted = _quoted(r"--[a-z-]+")
    assert len(quoted) > 10
    assert set(quoted) <= flags


def test_every_state_stage_and_field_is_one_of_the_protocol() -> None:
    files = read_protos()
    fields = {f.name for file in files for m in file.types for f in getattr(m, "fields", ())}
    enums = (
        admin_pb2.Health,
        types_pb2.TransferState,
        admin_pb2.BlockState,
        layout_pb2.Transport,
    )
    values = (value for enum in enums for value in enum.DESCRIPTOR.values_by_name)
    states = {re.sub(r"^[A-Z]+?(_STATE)?_", "", value).lower() for value in values}
    prose = (ROOT / "protos" / "pd_grpc" / "v1" / "types.proto").read_text(encoding="utf-8")
    stages = set(re.findall(r"\w+", prose[prose.index("Deadlines.") : prose.index("Health.")]))
    code = {start_router.__name__, start_prefill.__name__}
    events = {event.field for event in Event}
    unknown = set(_quoted(r"[a-z][a-z_]+")) - fields - states - stages - code - ERROR_INFO - events
    assert unknown == set()


def test_every_method_is_there() -> None:
    service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    methods = {f"AdminService.{method.name}" for method in service.methods}
    quoted = _quoted(r"\w+Service\.\w+")
    assert quoted and set(quoted) <= methods


@pytest.mark.parametrize("title", [title for title, _ in _sections()])
def test_a_section_tells_what_the_client_sees_what_shows_it_and_what_to_do(title: str) -> None:
    section = dict(_sections())[title]
    assert re.findall(r"^\| (\w+) \| \S.* \|$", section, re.MULTILINE) == ROWS
