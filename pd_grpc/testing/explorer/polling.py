"""Another system under the same explorer: what FastDeploy published before its hand-over was typed.

P posts a request for blocks to D and polls a dictionary, by request id, for D's answer. D answers
when it has blocks, keeps silent when it has none, and takes blocks back by a timer if no first
token comes. Nobody releases anything, nothing names a process or an attempt, and each hop counts a
timeout of its own. Messages are posted through queues that outlive the process they are meant for.

What the explorer says of it are the cases S10, S14, F44 and F46 of docs/explorer.md.
"""

from __future__ import annotations

from typing import Any

from pd_grpc.protocol.faults import Fault, Reason
from pd_grpc.protocol.refs import TransferKey
from pd_grpc.testing.explorer.client_process import Wish
from pd_grpc.testing.explorer.kv import BLOCK, Tag, TagMemory, answer_to, next_token, number_of
from pd_grpc.testing.explorer.process import Input, Looks, Process, server_of
from pd_grpc.testing.explorer.wire import BROKEN, CANCEL, END, Interned

WAIT_S = 30.0
"""How long P polls, whatever its caller's own time is."""

RECLAIM_S = 8.0
"""How long D keeps blocks without a first token."""


class PollingPrefill(Process):
    """P: it knows requests by their ids, and Ds by their addresses."""

    def __init__(self, name: str, epoch: int, ids: Interned) -> None:
        super().__init__(name, epoch, ids)
        self.wanted: dict[TransferKey, tuple[int, str, tuple[int, ...], float]] = {}
        self.answers: dict[TransferKey, tuple[int, ...]] = {}

    def looks(self) -> Looks:
        """See `Process.looks`."""
        until = [at for *_, at in self.wanted.values()]
        steps = ["poll"] * any(key in self.wanted for key in self.answers)
        steps += ["tick"] * any(at <= self.now for at in until)
        flying = tuple((key, w[0], w[1], 0, True, True) for key, w in self.wanted.items())
        calls = frozenset(w[0] for w in self.wanted.values())
        owed: frozenset[Any] = frozenset()
        facts = (flying, owed, self.epoch, calls)
        return Looks(tuple(steps), self._wake_s(*until), not self.wanted, facts)

    def left_over(self) -> list[str]:
        """See `Process.left_over`."""
        return [f"{self.name}: {key} is polled for" for key in self.wanted]

    def _happen(self, happens: Input) -> None:
        if happens[0] == "poll":
            for key in [key for key in self.answers if key in self.wanted]:
                self._send(key)
        elif happens[0] == "tick":
            for key, (call, _, _, at) in list(self.wanted.items()):
                if at <= self.now:
                    del self.wanted[key]
                    self._end(call, Fault(Reason.STAGE_DEADLINE, "no answer in the dictionary"))
        else:
            self._heard(happens[1], self._ids.messages[happens[2]])

    def _heard(self, call: int, message: Any) -> None:
        if message.kind == "info":
            self._end(call, None)
            number, blocks = message.body
            self.answers[TransferKey(f"t{number}", 1)] = blocks
        elif message.kind != CANCEL:  # of which nothing is thought
            number, decode, prompt = message.body
            key = TransferKey(f"t{number}", 1)
            self.wanted[key] = (call, decode, prompt, self.now + WAIT_S)
            self._post("ask", decode, str(key), (number, len(prompt), self.name))

    def _send(self, key: TransferKey) -> None:
        """Write the KV where D said, and tell it the first token."""
        call, decode, prompt, _ = self.wanted.pop(key)
        blocks = self.answers.pop(key)
        memory = TagMemory(len(blocks))
        table = range(len(blocks))
        for position, token in enumerate(prompt):
            memory.store(table, Tag(number_of(key), key.attempt, position, token))
        body = (number_of(key), blocks, b"".join(memory.cells), next_token(prompt), len(prompt))
        self._post("done", decode, str(key), body)
        self._end(call, None)

    def _check(self) -> None:
        """It promises nothing."""


class PollingDecode(Process):
    """D: blocks by request id, and a timer."""

    def __init__(self, name: str, epoch: int, ids: Interned, num_blocks: int) -> None:
        super().__init__(name, epoch, ids)
        self.memory = TagMemory(num_blocks)
        self.free = list(range(num_blocks))
        self.tasks: dict[TransferKey, tuple[tuple[int, ...], str, float]] = {}
        self.clients: dict[TransferKey, tuple[int, int]] = {}
        self.ready: dict[TransferKey, tuple[int, int]] = {}
        """First token and prompt tokens of those whose KV has come."""

    def looks(self) -> Looks:
        """See `Process.looks`."""
        until = [at for *_, at in self.tasks.values()]
        steps = ["tick"] * any(at <= self.now for at in until)
        steps += ["decode"] * any(key in self.clients for key in self.ready)
        kept = []
        for key, (_, prefill, _) in self.tasks.items():
            call = self.clients[key][0] if key in self.clients else None
            kept.append((key, "RESERVED", (prefill, self.epoch), call, False, False))
        calls = frozenset(call for call, _ in self.clients.values())
        facts = (self.epoch, tuple(kept), calls)
        return Looks(tuple(steps), self._wake_s(*until), not self.tasks, facts)

    def left_over(self) -> list[str]:
        """See `Process.left_over`."""
        return [f"{self.name}: blocks of {key}" for key in self.tasks]

    def _happen(self, happens: Input) -> None:
        if happens[0] == "tick":
            for key, (_, _, at) in list(self.tasks.items()):
                if at <= self.now:
                    self._reclaim(key)
            return
        if happens[0] == "decode":
            for key in [key for key in self.ready if key in self.clients]:
                self._decode(key)
            return
        call, message = happens[1], self._ids.messages[happens[2]]
        if message.kind == CANCEL:
            return  # It is read when the first token is there, and then nobody listens.
        if message.kind == "ask":
            self._end(call, None)
            self._ask(*message.body)
        elif message.kind == "done":
            self._end(call, None)
            self._done(*message.body)
        else:
            number, max_tokens = message.body
            self.clients[TransferKey(f"t{number}", 1)] = (call, max_tokens)

    def _ask(self, number: int, tokens: int, prefill: str) -> None:
        needed = -(-(tokens + 1) // BLOCK)
        if needed > len(self.free):
            return
        key = TransferKey(f"t{number}", 1)
        blocks = tuple(self.free[:needed])
        del self.free[:needed]
        self.tasks[key] = (blocks, prefill, self.now + RECLAIM_S)
        self._post("info", prefill, str(key), (number, blocks))

    def _done(
        self, number: int, blocks: tuple[int, ...], kv: bytes, token: int, prompt: int
    ) -> None:
        """The KV is in the blocks that the message names, and with it comes the first token."""
        self.memory.write(blocks, 0, 0, 1, memoryview(kv))
        key = TransferKey(f"t{number}", 1)
        if key in self.tasks:
            self.ready[key] = (token, prompt)

    def _decode(self, key: TransferKey) -> None:
        token, prompt = self.ready[key]
        table = self.tasks[key][0]
        call, max_tokens = self.clients.pop(key)
        stored = self.memory.tokens(table, prompt, key)
        tokens = [token]
        while len(tokens) < max_tokens:
            tokens.append(next_token([*stored, *tokens]))
        self._down(call, "tokens", tuple(tokens))
        self._end(call, None)
        self._reclaim(key)

    def _reclaim(self, key: TransferKey) -> None:
        blocks, _, _ = self.tasks.pop(key)
        self.ready.pop(key, None)
        self.free += blocks

    def _check(self) -> None:
        """It promises nothing."""


class PollingClient(Process):
    """A client with its two calls."""

    def __init__(self, name: str, epoch: int, ids: Interned, key: TransferKey, wish: Wish) -> None:
        super().__init__(name, epoch, ids)
        self.key = key
        self.wish = wish
        self.right = answer_to(wish.prompt, wish.max_tokens)
        self.tokens: list[int] = []
        self.result = ""
        self.started = False
        self.until: float | None = None
        self.calls: dict[str, int] = {}

    def looks(self) -> Looks:
        """See `Process.looks`."""
        steps = ["start"] * (not self.started)
        steps += ["tick"] * (self.until is not None and self.until <= self.now)
        server = server_of(self.wish.pairing.decode.endpoint)
        calls = frozenset(self.calls.values())
        facts = (self.key, self.result, "prefill" in self.calls, server, False, calls)
        return Looks(tuple(steps), self._wake_s(self.until), bool(self.result), facts)

    def left_over(self) -> list[str]:
        """See `Process.left_over`."""
        return [] if self.result else [f"{self.name}: the client has no answer"]

    def _happen(self, happens: Input) -> None:
        if happens[0] == "start":
            self.started = True
            self.until = self.now + self.wish.budget_s
            pairing, number = self.wish.pairing, number_of(self.key)
            assert pairing.prefill is not None
            decode = server_of(pairing.decode.endpoint)
            asked = (number, decode, self.wish.prompt)
            prefill = server_of(pairing.prefill.endpoint)
            self.calls["prefill"] = self._open("prefill", prefill, str(self.key), "prefill", asked)
            wanted = (number, self.wish.max_tokens)
            self.calls["generate"] = self._open(
                "generate", decode, str(self.key), "generate", wanted
            )
        elif happens[0] in ("tick", "leave"):
            self._over("left" if happens[0] == "leave" else "deadline")
        else:
            self._heard(happens[1], self._ids.messages[happens[2]])

    def _heard(self, call: int, message: Any) -> None:
        which = next((name for name, known in self.calls.items() if known == call), "")
        if message.kind == "tokens":
            self.tokens += message.body
        elif message.kind in (END, BROKEN) and which:
            del self.calls[which]
            if message.body is not None:
                self._over("failed")
            elif self.tokens:
                self._over("ok")

    def _over(self, result: str) -> None:
        self.started = True
        self.result = self.result or result
        self.until = None
        for call in self.calls.values():
            self._cancel(call)
        self.calls.clear()

    def _check(self) -> None:
        if self.tokens != self.right[: len(self.tokens)]:
            self._wrong("no wrong token", f"{self.tokens} instead of {self.right}")
