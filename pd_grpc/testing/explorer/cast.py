"""Who is in a world: for each name of a scenario, how its processes are made, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from pd_grpc.prefill.carriers import INLINE_ALONE
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.borrowing import CARRIERS
from pd_grpc.testing.explorer.client_process import ClientProcess, Wish
from pd_grpc.testing.explorer.decode_process import DecodeProcess
from pd_grpc.testing.explorer.polling import PollingClient, PollingDecode, PollingPrefill
from pd_grpc.testing.explorer.prefill_process import PrefillProcess
from pd_grpc.testing.explorer.process import Process
from pd_grpc.testing.explorer.recovering_client import RecoveringClient, watch_of
from pd_grpc.testing.explorer.scenario import FIRST_EPOCH, Scenario
from pd_grpc.testing.explorer.watching import Watching
from pd_grpc.testing.explorer.wire import Interned

YOUNGER = 50
"""How much greater the epochs of an heir are."""

Make: TypeAlias = Callable[[int], Process]
"""Makes the process of an epoch."""


def cast_of(scenario: Scenario, ids: Interned) -> list[Make]:
    """Everybody, in the order of the scenario's names."""
    return list((_polling if scenario.polling else _ours)(scenario, ids))


def _ours(scenario: Scenario, ids: Interned) -> Iterator[Make]:
    names = scenario.names
    epochs = dict.fromkeys(names, FIRST_EPOCH)
    for name in names[: scenario.prefills]:
        yield partial(_prefill, scenario, name, ids)
    for name in names[scenario.prefills : scenario.first_client]:
        yield partial(_decode, scenario, name, ids)
    for name, (key, wish) in zip(names[scenario.first_client :], _asked(scenario), strict=True):
        yield partial(_client, scenario, name, ids, key, wish, epochs)


def _polling(scenario: Scenario, ids: Interned) -> Iterator[Make]:
    names = scenario.names
    for name in names[: scenario.prefills]:
        yield partial(_polling_prefill, name, ids)
    for name in names[scenario.prefills : scenario.first_client]:
        yield partial(_polling_decode, name, ids, scenario.decode_blocks)
    for name, (key, wish) in zip(names[scenario.first_client :], _asked(scenario), strict=True):
        yield partial(_polling_client, name, ids, key, wish)


def _asked(scenario: Scenario) -> Iterator[tuple[TransferKey, Wish]]:
    for i, wish in enumerate(scenario.wishes()):
        yield TransferKey(f"t{i + 1}", 1), wish


def watches_of(scenario: Scenario, ids: Interned) -> list[int]:
    """The health watches that are open from the beginning."""
    instances, clients = scenario.targets, scenario.names[scenario.first_client :]
    return [
        watch_of(ids, client, FIRST_EPOCH, target.name)
        for client in clients
        for target in instances
        if scenario.recovery
    ]


def _first_watches(scenario: Scenario, name: str, ids: Interned, epoch: int) -> set[int]:
    if epoch != FIRST_EPOCH:
        return set()
    return {call for call in watches_of(scenario, ids) if ids.calls[call].server == name}


def _poisons(scenario: Scenario, name: str) -> set[str]:
    return {client for engine, client in scenario.poisons if engine == name}


def _prefill(scenario: Scenario, name: str, ids: Interned, epoch: int) -> Process:
    carriers = CARRIERS if scenario.one_sided else INLINE_ALONE
    # Its name is the first one's, and its processes are all younger than any of that.
    heir = scenario.heir and name == scenario.names[1]
    known_as = (scenario.names[0], epoch + YOUNGER) if heir else None
    process = PrefillProcess(
        name,
        epoch,
        ids,
        scenario.prefill_config(),
        scenario.fine,
        carriers,
        known_as,
        scenario.cut(scenario.prefill_shards),
    )
    process.watchers |= _first_watches(scenario, name, ids, epoch)
    process.poisoned |= _poisons(scenario, name)
    return process


def _decode(scenario: Scenario, name: str, ids: Interned, epoch: int) -> Process:
    process = DecodeProcess(
        name,
        epoch,
        ids,
        scenario.decode_config(),
        scenario.fine,
        scenario.one_sided,
        scenario.cut(scenario.decode_shards),
    )
    process.watchers |= _first_watches(scenario, name, ids, epoch)
    process.poisoned |= _poisons(scenario, name)
    return process


def _client(
    scenario: Scenario,
    name: str,
    ids: Interned,
    key: TransferKey,
    wish: Wish,
    epochs: dict[str, int],
    epoch: int,
) -> Process:
    config = scenario.router_config()
    if scenario.recovery:
        watching = Watching(scenario.targets)
        return RecoveringClient(name, epoch, ids, key, wish, config, watching)
    return ClientProcess(name, epoch, ids, key, wish, epochs, config, scenario.direct)


def _polling_prefill(name: str, ids: Interned, epoch: int) -> Process:
    return PollingPrefill(name, epoch, ids)


def _polling_decode(name: str, ids: Interned, num_blocks: int, epoch: int) -> Process:
    return PollingDecode(name, epoch, ids, num_blocks)


def _polling_client(name: str, ids: Interned, key: TransferKey, wish: Wish, epoch: int) -> Process:
    return PollingClient(name, epoch, ids, key, wish)
