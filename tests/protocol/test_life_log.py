"""What an instance goes through has a line when it is news."""

from __future__ import annotations

import logging

import pytest

from pd_grpc.protocol.life_log import DRAINING, STOPPING, LifeLog
from pd_grpc.telemetry.instance_log import InstanceLog
from pd_grpc.telemetry.logs import LOGGER


def _told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(r.levelname, getattr(r, "event", "")) for r in caplog.records]


@pytest.fixture
def life(caplog: pytest.LogCaptureFixture) -> LifeLog:
    caplog.set_level(logging.INFO, LOGGER)
    return LifeLog(InstanceLog("decode", "d0"))


def test_a_life_from_start_to_stop(life: LifeLog, caplog: pytest.LogCaptureFixture) -> None:
    life.started("decode", "127.0.0.1:1")
    life.readiness(True, "")
    life.readiness(False, "the engine made no progress")
    life.readiness(True, "")
    life.readiness(False, DRAINING)
    life.readiness(False, STOPPING)
    life.stopped()
    assert _told(caplog) == [
        ("INFO", "instance_started"),
        ("INFO", "instance_ready"),
        ("WARNING", "instance_not_ready"),
        ("INFO", "instance_ready"),
        ("INFO", "instance_draining"),
        ("INFO", "instance_stopped"),
    ]
    assert "the engine made no progress" in caplog.text


def test_what_is_said_again_is_no_news(life: LifeLog, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        life.readiness(False, "no prefill instance is ready")
    life.readiness(False, "no decode instance is ready")
    life.readiness(True, "")
    life.readiness(True, "")
    assert _told(caplog) == [
        ("INFO", "instance_not_ready"),
        ("INFO", "instance_not_ready"),
        ("INFO", "instance_ready"),
    ], "one that has not served yet has nothing to be warned of"
