"""D28x: a D that finds KV which is not that of the prompt, or keeps what it must not."""

from __future__ import annotations

import pytest

from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.decode import checks
from pd_grpc.decode.ledger import Ledger
from pd_grpc.decode.prefill_desk import PrefillDesk
from pd_grpc.decode.prefix_reuse import PrefixReuse
from pd_grpc.protocol import block_hashes
from tests.conformance.mutants.decode.mismatch import overlook
from tests.conformance.mutants.decode.registry import DECODE_MUTANTS as mutant


@mutant("D280")
def only_the_first_block_is_compared(patch: pytest.MonkeyPatch) -> None:
    right = PrefixCache.find

    def find(self, names):  # type: ignore[no-untyped-def]
        found = right(self, names[:1])
        blocks = list(self._block_of.values())
        at = blocks.index(found[0]) if found else 0
        return blocks[at : at + len(names)] if found else []

    patch.setattr(PrefixCache, "find", find)


@mutant("D280")
def cached_tokens_are_not_told(patch: pytest.MonkeyPatch) -> None:
    right = PrefillDesk._cache_info

    def cache_info(self, transfer):  # type: ignore[no-untyped-def]
        response = right(self, transfer)
        response.ClearField("cached_tokens")
        return response

    patch.setattr(PrefillDesk, "_cache_info", cache_info)


@mutant("D280")
def the_last_block_is_kept_though_it_is_not_whole(patch: pytest.MonkeyPatch) -> None:
    right = PrefixReuse.wanted

    def wanted(self, transfer):  # type: ignore[no-untyped-def]
        runs = right(self, transfer)
        if transfer.cached_tokens and runs and runs[0][1] == 1:
            return ()
        return runs

    patch.setattr(PrefixReuse, "wanted", wanted)


@mutant("D281")
def the_names_of_p_are_believed(patch: pytest.MonkeyPatch) -> None:
    overlook(patch, "block_hashes")


@mutant("D282")
def what_is_granted_is_kept_at_once(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.grant

    def grant(self, transfer, reserved):  # type: ignore[no-untyped-def]
        right(self, transfer, reserved)
        names = [each.hash for each in transfer.prefill.request.block_hashes]
        self.cache.add(names, transfer.holding.blocks[: len(names)])

    patch.setattr(Ledger, "grant", grant)


@mutant("D282")
def what_is_granted_is_kept_while_its_transfer_lives(patch: pytest.MonkeyPatch) -> None:
    what_is_granted_is_kept_at_once(patch)
    right = Ledger._give_back

    def give_back(self, transfer, fault):  # type: ignore[no-untyped-def]
        if transfer.holding is not None:
            self.cache.distrust(transfer.holding.blocks)
        right(self, transfer, fault)

    patch.setattr(Ledger, "_give_back", give_back)


@mutant("D283")
def a_salt_is_no_part_of_a_name(patch: pytest.MonkeyPatch) -> None:
    """Of any name D finds or keeps, the kit's included: both sides would have to agree on it."""
    right = block_hashes._root
    patch.setattr(block_hashes, "_root", lambda salt, adapter, media: right(b"", adapter, media))


@mutant("D284")
def names_of_any_size_and_number_are_taken(patch: pytest.MonkeyPatch) -> None:
    original = checks.check_allocate

    def check(request, limits, negotiated):  # type: ignore[no-untyped-def]
        kept = list(request.block_hashes)
        del request.block_hashes[:]
        original(request, limits, negotiated)
        request.block_hashes.extend(kept)

    patch.setattr("pd_grpc.decode.prefill_desk.check_allocate", check)


@mutant("D285")
def salts_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    overlook(patch, "scope.cache_salt")
