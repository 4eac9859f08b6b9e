"""What becomes of P's links has lines, on both ends, and each of them once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pd_grpc.decode.server import DecodeServer
from pd_grpc.prefill.server import PrefillServer
from pd_grpc.telemetry.logs import LOGGER
from tests.lines import line_to
from tests.prefill.cluster import Cluster, request_to, running
from tests.waiting import LIMIT_S, until


class Said:
    """The lines of links, as (instance, event, peer)."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, LOGGER)
        self._caplog = caplog

    def of(self, instance: str, *events: str) -> list[tuple[str, str]]:
        """Event and peer of an instance's lines, of these events."""
        found = [r for r in self._caplog.records if getattr(r, "instance", "") == instance]
        told = [(getattr(r, "event", ""), getattr(r, "peer", "")) for r in found]
        return [(event, peer) for event, peer in told if event in events]

    def texts(self, event: str) -> list[str]:
        """What the lines of an event say."""
        return [r.getMessage() for r in self._caplog.records if getattr(r, "event", "") == event]

    def reasons(self, instance: str, event: str) -> list[str]:
        """The reasons of an instance's lines of an event."""
        found = [r for r in self._caplog.records if getattr(r, "instance", "") == instance]
        return [getattr(r, "reason", "") for r in found if getattr(r, "event", "") == event]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    return Said(caplog)


async def _answered(cluster: Cluster, p: PrefillServer, d: DecodeServer, seed: int) -> bool:
    # Where P cannot turn to D, the client's leg waits there in vain.
    prefill, generate = await cluster.run(p, d, request_to(d, random_seed=seed), timeout_s=1)
    return prefill.fault is None and generate.fault is None


async def test_a_d_that_leaves_and_comes_back_has_a_line_for_each_turn(said: Said) -> None:
    async with running() as cluster:
        d = await cluster.decode(name="d0")
        p = await cluster.prefill(name="p0")
        assert await _answered(cluster, p, d, 1)
        at, port = d.endpoint, d.control.port
        opened, lost = ("session_opened", at), ("session_lost", at)
        shut, open_again = ("breaker_opened", at), ("breaker_closed", at)
        turns = ("session_opened", "session_lost", "breaker_opened", "breaker_closed")
        await cluster.stop(d)
        asking = [cluster.run_prefill(p, request_to(d, random_seed=n)) for n in range(2, 12)]
        outcomes = await asyncio.gather(*asking)
        assert all(outcome.fault is not None for outcome in outcomes)
        await until(lambda: shut in said.of("p0", *turns))
        back = await cluster.decode(name="d0", port=port)

        async def served() -> None:
            seed = 20
            while not await _answered(cluster, p, back, seed):
                seed += 1

        await asyncio.wait_for(served(), LIMIT_S)
        await until(lambda: open_again in said.of("p0", *turns))
        heard = said.of("p0", *turns)
    assert heard[0] == opened
    assert heard.count(opened) == 2 and heard.count(shut) == 1 and heard.count(open_again) == 1
    assert heard.count(lost) <= 1, "tries to connect that fail are no news"
    assert heard.index(shut) < len(heard) - 1 - heard[::-1].index(opened)


async def test_a_link_that_breaks_and_mends_has_lines_on_both_ends(said: Said) -> None:
    async with running() as cluster:
        d = await cluster.decode(name="d0", grace_s=5.0)
        p = await cluster.prefill(name="p0", session_idle_s=30.0)
        async with line_to(d.endpoint) as line:
            through = request_to(d, random_seed=1)
            through.decodes[0].endpoint = line.endpoint
            prefill, generate = await cluster.run(p, d, through)
            assert prefill.fault is None and generate.fault is None
            await line.cut()
            await until(lambda: ("session_lost", "p0") in said.of("d0", "session_lost"))
            await until(lambda: bool(said.of("p0", "session_lost")))
    assert said.of("p0", "session_lost") == [("session_lost", line.endpoint)]
    assert said.of("d0", "session_opened", "session_lost")[:2] == [
        ("session_opened", "p0"),
        ("session_lost", "p0"),
    ]


@pytest.mark.parametrize(("transports", "way"), [(("inline",), "inline"), (("shm",), "shm")])
async def test_p_says_by_which_transport_its_kv_goes(
    said: Said, transports: tuple[str, ...], way: str
) -> None:
    async with running() as cluster:
        d = await cluster.decode(name="d0", transports=transports)
        p = await cluster.prefill(name="p0", transports=transports)
        assert await _answered(cluster, p, d, 1)
    assert set(said.texts("session_opened")) == {f"session with d0, KV by {way}", "session with p0"}


async def test_ps_and_ds_that_do_not_fit_say_so_on_both_ends(said: Said) -> None:
    async with running() as cluster:
        d = await cluster.decode(name="d0", block_size=8)
        p = await cluster.prefill(name="p0")
        outcome = await cluster.run_prefill(p, request_to(d, random_seed=1))
        assert outcome.fault is not None
    assert said.reasons("p0", "session_lost")[0] == "LAYOUT_MISMATCH"
    assert said.reasons("d0", "session_lost")[0] == "LAYOUT_MISMATCH"
