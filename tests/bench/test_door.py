from __future__ import annotations

import asyncio

from pd_grpc.bench.door import Door, Manners


async def is_let_in(door: Door) -> bool:
    """Whether somebody who comes now gets in without waiting for anything but the loop's turn."""
    try:
        await asyncio.wait_for(door.enter(), 0.05)
    except asyncio.TimeoutError:
        return False
    return True


async def test_the_door_is_open_while_no_step_runs() -> None:
    assert await is_let_in(Door())


async def test_who_comes_during_a_step_waits_for_its_end() -> None:
    door = Door()
    door.step(True)
    await asyncio.sleep(0)
    entering = asyncio.create_task(door.enter())
    done, _ = await asyncio.wait([entering], timeout=0.05)
    assert not done
    door.step(False)
    # The next step begins at once, and those who waited are in all the same.
    door.step(True)
    await asyncio.wait_for(entering, 60)
    assert not await is_let_in(door)


async def test_a_silent_door_never_opens() -> None:
    door = Door()
    door.manners = Manners(silent=True)
    assert not await is_let_in(door)


async def test_a_slow_door_opens_after_its_time() -> None:
    door = Door()
    door.manners = Manners(delay_s=0.2)
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(door.enter(), 60)
    assert asyncio.get_running_loop().time() - began >= 0.2 - 0.01
