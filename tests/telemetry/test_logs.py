"""Log lines carry whose work it is, and nothing that was not meant to be written."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from pd_grpc.telemetry.logs import (
    FIELDS,
    LOGGER,
    MAX_FIELD_CHARS,
    MAX_MESSAGE_CHARS,
    OTHERS_LINES,
    OTHERS_PERIOD_S,
    HumanFormatter,
    LineHandler,
    configure_logging,
)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger(LOGGER)
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_json_line_is_one_object_with_its_time_level_logger_message_and_extras() -> None:
    out = io.StringIO()
    configure_logging("json", "info", out)
    logging.getLogger("pd_grpc.decode").warning(
        "%d blocks short", 3, extra={"transfer_id": "t-1", "attempt": 2, "trace_id": "ab" * 16}
    )
    (line,) = lines(out)
    record = json.loads(line)
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "warning",
        "logger": "pd_grpc.decode",
        "message": "3 blocks short",
        "transfer_id": "t-1",
        "attempt": 2,
        "trace_id": "ab" * 16,
    }


def test_a_human_line_names_the_part_the_message_and_the_extras() -> None:
    out = io.StringIO()
    configure_logging("human", "info", out)
    logging.getLogger("pd_grpc.prefill.service").info("sent", extra={"transfer_id": "t-1"})
    (line,) = lines(out)
    assert line.endswith("INFO    prefill.service  sent  transfer_id=t-1")


@pytest.mark.parametrize("format", ["human", "json"])
def test_an_extra_that_has_no_place_in_a_log_is_never_written(format: str) -> None:
    out = io.StringIO()
    configure_logging(format, "debug", out)  # type: ignore[arg-type]
    secret = "the prompt text"
    extras = dict.fromkeys(("prompt", "text", "token_ids", "messages", "trace", "data"), secret)
    logging.getLogger("pd_grpc.router").debug("routed", extra={**extras, "trace_id": "cd"})
    (line,) = lines(out)
    assert secret not in line
    assert "routed" in line and "cd" in line
    assert not set(extras) & set(FIELDS)


@pytest.mark.parametrize("format", ["human", "json"])
@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x9b", "\u2028", "\x00"])
def test_a_clients_name_for_its_request_cannot_forge_a_line(format: str, character: str) -> None:
    out = io.StringIO()
    configure_logging(format, "info", out)  # type: ignore[arg-type]
    name = f"r{character}1"
    logging.getLogger("pd_grpc.router").info("taken: %s", name, extra={"request_id": name})
    assert len(lines(out)) == 1
    assert character not in out.getvalue().removesuffix("\n")


def test_a_failure_is_logged_with_its_traceback() -> None:
    out = io.StringIO()
    configure_logging("json", "info", out)
    try:
        raise KeyError("missing")
    except KeyError:
        logging.getLogger("pd_grpc.engine").exception("step failed")
    record = json.loads(lines(out)[0])
    assert record["message"] == "step failed"
    assert record["exception"].endswith("KeyError"), "what it says may be of a prompt"


@pytest.mark.parametrize(
    "text",
    ["two\nlines", "\x00\x1b\x7f", "a lone \ud800 surrogate", '"quoted" \\ and \u2028', "é漢😀"],
)
def test_a_json_line_is_one_valid_object_whatever_it_says(text: str) -> None:
    out = io.StringIO()
    configure_logging("json", "info", out)
    try:
        raise ValueError(text)
    except ValueError as error:
        logging.getLogger("pd_grpc.engine").error(
            "%s", text, exc_info=error, extra={"request_id": text}
        )
    written = out.getvalue()
    assert written.count("\n") == 1 and written.endswith("\n")
    record = json.loads(written)
    for name in ("message", "request_id", "exception"):
        assert record[name].encode("utf-8"), "a strict reader takes no lone surrogate"
    if "\ud800" not in text:
        assert (record["message"], record["request_id"]) == (text, text)


def test_a_human_traceback_is_set_in_and_cannot_forge_a_line() -> None:
    out = io.StringIO()
    configure_logging("human", "info", out)
    try:
        raise ValueError("\x1b[2J\n12:00:00.000 INFO    router  all is well \ud800")
    except ValueError as error:
        logging.getLogger("pd_grpc.engine").error("step failed", exc_info=error)
    first, *rest = lines(out)
    assert first.endswith("step failed")
    assert rest and all(line.startswith("    ") for line in rest)
    assert "\x1b" not in out.getvalue() and "\ud800" not in out.getvalue()


def test_a_record_whose_arguments_do_not_fit_is_still_a_line() -> None:
    out = io.StringIO()
    configure_logging("json", "info", out)
    logging.getLogger("pd_grpc.router").info("%d of %d", "three")
    assert json.loads(lines(out)[0])["message"] == "%d of %d"


@pytest.mark.parametrize("format", ["human", "json"])
def test_a_name_that_does_not_end_is_cut(format: str) -> None:
    out = io.StringIO()
    configure_logging(format, "info", out)  # type: ignore[arg-type]
    logging.getLogger("pd_grpc.router").info("p" * 10**6, extra={"peer": "n" * 10**6})
    assert len(out.getvalue()) < MAX_MESSAGE_CHARS + MAX_FIELD_CHARS + 200


def test_a_line_that_says_no_instance_is_the_processs() -> None:
    out = io.StringIO()
    handler = configure_logging("json", "info", out, instance="decode")
    logging.getLogger("pd_grpc.engine").info("before it has its name")
    handler.instance = "d7"
    logging.getLogger("pd_grpc.engine").info("its own")
    logging.getLogger("pd_grpc.decode").info("told", extra={"instance": "d8"})
    assert [json.loads(line)["instance"] for line in lines(out)] == ["decode", "d7", "d8"]


def test_what_others_warn_of_is_a_line_like_ours_where_that_is_wanted() -> None:
    out = io.StringIO()
    handler = configure_logging("json", "info", out, instance="d0", everyone=True)
    try:
        logging.getLogger("somebody.else").warning("not ours")
        logging.getLogger("pd_grpc.decode").info("ours")
    finally:
        logging.getLogger().removeHandler(handler)
    records = [json.loads(line) for line in lines(out)]
    assert [(r["logger"], r["instance"]) for r in records] == [
        ("somebody.else", "d0"),
        ("pd_grpc.decode", "d0"),
    ]


def test_lines_below_the_level_and_of_other_loggers_are_left_out() -> None:
    out = io.StringIO()
    configure_logging("human", "warning", out)
    logging.getLogger("pd_grpc.router").info("too small")
    logging.getLogger("somebody.else").error("not ours")
    logging.getLogger("pd_grpc.router").warning("kept")
    assert [line.split("  ")[-1] for line in lines(out)] == ["kept"]


def test_configuring_again_replaces_what_was_set_up() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("human", "info", first)
    configure_logging("json", "info", second)
    logging.getLogger("pd_grpc").info("once")
    assert lines(first) == []
    assert len(lines(second)) == 1


def test_a_field_cannot_be_taken_for_several() -> None:
    out = io.StringIO()
    configure_logging("human", "info", out)
    forged = 'x trace_id=dead code="OK" \u202etxet\u202c \u200b\ufeff'
    logging.getLogger("pd_grpc.router").info("failed", extra={"request_id": forged})
    line = lines(out)[0]
    assert line.endswith(r'request_id="x trace_id=dead code=\"OK\" \u202etxet\u202c \u200b\ufeff"')


def test_a_flood_of_anothers_lines_is_bounded_and_counted() -> None:
    out, now = io.StringIO(), 100.0
    handler = LineHandler(out, HumanFormatter(), "d0", lambda: now)
    others, ours = logging.getLogger("somebody.else"), logging.getLogger("pd_grpc.flood")
    for logger in (others, ours):
        logger.addHandler(handler)
        logger.propagate = False
    try:
        for _ in range(1000):
            others.error("cannot be read", exc_info=ValueError("garbage"))
            ours.error("one of ours")
        assert out.getvalue().count("cannot be read") == OTHERS_LINES
        assert out.getvalue().count("one of ours") == 1000
        now += OTHERS_PERIOD_S
        others.error("cannot be read")
        assert f"{1000 - OTHERS_LINES} lines of this kind were left out" in out.getvalue()
        assert out.getvalue().count("cannot be read") == OTHERS_LINES + 1
    finally:
        for logger in (others, ours):
            logger.removeHandler(handler)
            logger.propagate = True
