"""The benchmark of moving KV: it moves real bytes, and notices when they are not what was sent."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.bench.kv.decoding import KINDS, Stretches
from pd_grpc.bench.kv.figures import AT_ONCE, TARGETS, moving_figures
from pd_grpc.bench.kv.legs import Case, Leg, cases_of, running_pairs, wrong_blocks
from pd_grpc.bench.kv.moving import MOST_FAILURES, Group, order
from pd_grpc.bench.kv.ours import EPOCH, SESSION, Landing, left_out
from pd_grpc.bench.kv.pool import LAYOUT, KvPool
from pd_grpc.bench.kv.pushing import Pusher
from pd_grpc.bench.kv.run import KvScope, bench_kv, faults_of
from pd_grpc.bench.kv.ways import BASELINES, TRANSPORTS
from pd_grpc.protocol.config import PrefillConfig
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.transport.nixl import agent

MISSING = [name for name in ("zmq", "torch") if importlib.util.find_spec(name) is None]
needs_extra = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")


@needs_extra
async def test_every_way_moves_every_block_as_it_was() -> None:
    seen = set()
    transports = [name for name in TRANSPORTS if name not in left_out()]
    async with running_pairs([[*BASELINES, *transports]], 16, {}) as pairs:
        for number, case in enumerate(cases_of(16, AT_ONCE, transports)):
            leg = await pairs[case.way].run(case, number)
            assert not leg.wrong, leg
            assert leg.seconds > 0 and leg.sender_cpu_s > 0
            assert len(leg.took_s) == case.at_once
            seen.add(case.way)
    assert seen == {*BASELINES, *transports} and {"inline", "shm"} <= seen


def test_a_transport_that_cannot_be_used_here_is_left_out_and_the_reason_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent, "find_spec", lambda name: None)
    missing = left_out()
    assert set(missing) == {"nixl"} and "pip install --no-deps nixl==" in missing["nixl"]


async def test_a_block_that_does_not_come_is_noticed() -> None:
    """What the receiver drops it has not got, whatever its pool held before."""
    if "zmq" in MISSING:
        pytest.skip("pyzmq is not installed")
    async with running_pairs([["zmq"]], 4, {}) as pairs:
        pair = pairs["zmq"]
        told: dict[str, Any] = {"way": "zmq", "names": ["t"], "blocks": 8, "fragmented": False}
        await pair.receiver.do("expect", seed=1, **told)
        sent = await pair.sender.do("send", seed=2, **told)
        landed = await pair.receiver.do("landed")
        assert wrong_blocks(sent["digests"], landed["digests"]) == 0
        await pair.receiver.do("expect", seed=1, **told)
        # Nothing is sent, and what came before is there no more.
        pool = await pair.receiver.do("digests")
        assert wrong_blocks(sent["digests"], pool) == 8
        await pair.sender.do("send", seed=2, **told)
        await pair.receiver.do("landed")


def test_blocks_in_another_order_or_missing_are_wrong() -> None:
    assert wrong_blocks([[1, 2], [3]], [[1, 2], [3]]) == 0
    assert wrong_blocks([[1, 2], [3]], [[2, 1], [3]]) == 2
    assert wrong_blocks([[1, 2], [3]], [[1], [3]]) == 1
    assert wrong_blocks([[1, 2], [3]], [[1, 2]]) == 1


def test_a_pool_gives_runs_or_blocks_from_all_over_and_all_come_back() -> None:
    pool = KvPool(32, seed=3)
    runs = pool.take(2, 8, fragmented=False, seed=0, owner="test")
    assert [list(each.blocks) for each in runs] == [list(range(8)), list(range(8, 16))]
    assert pool.region(runs[1].blocks).nbytes == 8 * len(pool.region([0]))
    pool.give_back(runs)
    scattered = pool.take(1, 16, fragmented=True, seed=5, owner="test")
    (blocks,) = (list(each.blocks) for each in scattered)
    assert sorted(blocks) != blocks and len(set(blocks)) == 16
    with pytest.raises(ValueError, match="single run"):
        pool.region(blocks)
    before = pool.digests([blocks])
    pool.poison([blocks[:1]])
    assert wrong_blocks(before, pool.digests([blocks])) == 1
    pool.give_back(scattered)
    pool.accounts.check()
    assert pool.accounts.free == 32


def test_each_case_comes_first_in_some_round_and_none_is_left_out() -> None:
    cases = cases_of(256, AT_ONCE, list(TRANSPORTS))
    firsts = set()
    for turn in range(3 * len(cases)):
        turned = order(cases, turn)
        assert sorted(turned) == sorted(cases)
        firsts.add(turned[0])
    assert len(firsts) > len(cases) // 2


def leg(case: Case, rate: float, took: Sequence[float] = (), wrong: int = 0) -> Leg:
    seconds = case.mib / 1024 / rate
    mib = float(1 << 20)
    return Leg(case, seconds, took or [seconds], 0.5, 0.25, 10 * mib, 20 * mib, wrong)


def test_ratios_are_those_of_the_rounds_and_null_for_what_is_not_built() -> None:
    def of(mib: int, scale: float) -> list[Leg]:
        return [
            leg(Case("memcpy", mib), 10 * scale),
            leg(Case("tcp", mib), 4 * scale),
            leg(Case("zmq", mib), 2 * scale),
            leg(Case("bare_grpc", mib), 1 * scale),
            leg(Case("zmq_dropped", mib), 4 * scale),
            leg(Case("bare_grpc_dropped", mib), 2 * scale),
            leg(Case("inline", mib), 0.8 * scale),
            leg(Case("inline", mib, AT_ONCE), 0.6 * scale, [1.0] * 7 + [1.2]),
            leg(Case("inline", mib, 1, True), 0.72 * scale),
            leg(Case("inline", mib, AT_ONCE, True), 0.5 * scale, [1.0] * 7 + [2.0]),
        ]

    # The machine is three times as slow in the second round, and that makes no difference.
    figures = moving_figures([of(16, 7.0), of(256, 3.0), of(256, 1.0)])
    assert figures["headline_mib"] == 256
    assert figures["inline_over_bare_grpc"] == pytest.approx(0.8)
    assert figures["inline_over_zmq"] == pytest.approx(0.4)
    assert figures["fragmented_over_contiguous"] == pytest.approx(0.9)
    assert figures["eight_over_one"] == pytest.approx(0.75)
    assert figures["slowest_over_fastest"] == pytest.approx(1.2)
    assert figures["peak_mib_per_pair"] == pytest.approx(30)
    assert set(figures["by_transport"]) == {"inline"}
    assert figures["by_transport"]["inline"]["eight_over_one"] == figures["eight_over_one"]
    assert figures["shm_over_memcpy"] is None and figures["nixl_over_tcp"] is None
    row = next(r for r in figures["rows"] if (r["way"], r["mib"]) == ("tcp", 16))
    assert row["gib_per_s"] == pytest.approx(28)
    assert row["cpu_s_per_gib"]["sender"] == pytest.approx(32)
    decoding = ("itl_p99_under_transfers", "control_p99_under_bulk")
    others = {*decoding, "exposed_over_layer_share"}
    assert {target.figure for target in TARGETS} <= {*figures, *others}


def test_what_a_d_that_decodes_was_like_is_told_over_what_it_is_like_alone() -> None:
    def heard(gap: float, control: float) -> dict[str, Any]:
        return {"gaps_ms": [1.0] * 90 + [gap] * 10, "control_ms": [control] * 5, "failed": 1}

    kinds = {"quiet": 10.0, "busy": 20.0, "apart": 15.0, "spinning": 11.0}
    found = Stretches({kind: [heard(ms, ms / 5)] for kind, ms in kinds.items()}, {"busy": 1 << 30})
    figures = found.figures()
    assert set(kinds) == set(KINDS)
    assert figures["itl_p99_under_transfers"] == pytest.approx(2)
    assert figures["control_p99_under_bulk"] == pytest.approx(2)
    assert figures["itl_p99_beside_bulk_apart"] == pytest.approx(1.5)
    assert figures["control_p99_beside_spinning"] == pytest.approx(1.1)
    assert (
        figures["decoding"]["landed_gib_per_s"] == {"busy": 1}
        and figures["decoding"]["failed"] == 4
    )
    assert figures["decoding"]["tokens"]["busy"] == 100


def test_a_run_with_a_wrong_block_or_answer_is_worthless() -> None:
    fine: dict[str, Any] = {"failures": [], "wrong_blocks": 0, "decoding": {"failed": 0}}
    assert not faults_of(fine)
    assert "2 blocks" in faults_of({**fine, "wrong_blocks": 2})[0]
    assert "zmq is lost" in faults_of({**fine, "failures": ["zmq is lost"]})[0]
    assert "1 answers" in faults_of({**fine, "decoding": {"failed": 1}})[0]


def test_the_plot_has_a_line_for_what_was_run(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    from pd_grpc.bench.kv.plot import plot_rates

    legs = [leg(case, 1.0) for case in cases_of(16, AT_ONCE, list(TRANSPORTS))]
    report = {
        **moving_figures([legs]),
        "machine": {"cores": 2},
        "load_average": {"before": (1.0, 1.0, 1.0)},
    }
    assert {row["way"] for row in report["rows"]} == set(BASELINES) | set(TRANSPORTS)
    plot_rates(report, tmp_path / "kv.png")
    assert (tmp_path / "kv.png").read_bytes().startswith(b"\x89PNG")


async def test_a_leg_that_fails_is_named_and_the_next_has_processes_again() -> None:
    failures: list[str] = []
    group = Group(["inline"], 4, failures)
    try:
        assert await group.run(Case("inline", 4), 1) is not None
        # More than the pools hold: both processes end.
        assert await group.run(Case("inline", 8), 2) is None
        assert len(failures) == 1 and "inline" in failures[0] and "has ended" in failures[0]
        leg = await group.run(Case("inline", 4), 3)
        assert leg is not None and not leg.wrong
        for number in range(4, 3 + MOST_FAILURES):
            assert await group.run(Case("inline", 8), number) is None
        # By now it is left out.
        assert await group.run(Case("inline", 4), 99) is None
        assert len(failures) == MOST_FAILURES
    finally:
        await group.stop()


async def test_a_run_of_which_every_part_fails_still_has_its_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process of the benchmark can be started: nothing worse can happen to a run."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    kept: list[dict[str, Any]] = []
    report = await bench_kv(
        KvScope(True, (1, 2), 1, 1.0, 1, 0.1, 1, 0.1), lambda text: None, kept.append
    )
    named = " ".join(report["failures"])
    assert all(way in named for way in (*BASELINES, "inline", "shm"))
    assert "a D that decodes" in named and "sending beside computing" in named
    assert report["complete"] and not any(each["complete"] for each in kept) and kept
    assert report["rows"] == [] and report["itl_p99_under_transfers"] is None
    assert not report["targets_met"]
    assert len(faults_of(report)) == len(report["failures"])


async def test_a_cancellation_that_meets_the_end_of_a_push_is_not_lost() -> None:
    """As when a P that pushes without end is told to rest: it would push for ever."""
    pool = KvPool(2, seed=1)
    landing = Landing(True)
    there = await landing.start(KvPool(2, seed=None), {})
    pusher = Pusher(LAYOUT, pool.memory, PrefillConfig())
    key = TransferKey("t", 1)
    try:
        await landing.expect(["t"], [[0, 1]])
        pushing = asyncio.create_task(
            pusher.push(key, there["endpoint"], SESSION, "t", EPOCH, [0, 1])
        )
        await asyncio.sleep(0)
        # Called when it is over, and before `push` hears of it.
        pusher.waiting[key].add_done_callback(lambda done: pushing.cancel())
        with pytest.raises(asyncio.CancelledError):
            await pushing
        await landing.landed()
    finally:
        await asyncio.to_thread(pusher.stop)
        await landing.stop()
