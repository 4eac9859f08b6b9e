"""Who takes requests, as a router knows it: what its health watches said last.

The rules are those of `router.discovery`, whose tasks and channels are calls of the world here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pd_grpc.router.policies import Target


@dataclass
class View:
    """One instance; `serving` is what its watch said last, `declines` that it answers and takes no
    requests."""

    target: Target
    ready: bool = True
    serving: bool = True
    declines: bool = False


class Watching:
    """Every instance that a router knows of, by name; all of them are ready at first."""

    def __init__(self, targets: Iterable[Target]) -> None:
        self._views = {target.name: View(target) for target in targets}

    @property
    def names(self) -> list[str]:
        """Everybody, Ps first."""
        return list(self._views)

    def epoch(self, name: str) -> int:
        """Of the process that answered last."""
        return self._views[name].target.epoch

    def heard(self, name: str, epoch: int, serving: bool) -> None:
        """A watch has said something."""
        view = self._views[name]
        view.target = replace(view.target, epoch=epoch)
        view.ready = view.serving = serving
        view.declines = not serving

    def lost(self, name: str) -> None:
        """A watch has broken."""
        view = self._views[name]
        view.ready = view.serving = view.declines = False

    def suspect(self, name: str) -> bool:
        """A call said that another process answers there; whether to ask who it is."""
        view = self._views[name]
        was_ready, view.ready = view.ready, False
        return was_ready

    def identified(self, name: str, epoch: int) -> None:
        """Who answers has been asked, and told."""
        view = self._views[name]
        view.target = replace(view.target, epoch=epoch)
        view.ready = view.serving

    def ready(self, role: str) -> list[Target]:
        """The instances of a role, `p` or `d`, that take requests."""
        return [v.target for name, v in self._views.items() if name[0] == role and v.ready]

    def others_out_of_reach(self, name: str) -> bool:
        """Whether another instance of a role is neither ready nor says that it takes nothing."""
        others = [v for n, v in self._views.items() if n[0] == name[0] and n != name]
        return any(not (view.ready or view.declines) for view in others)
