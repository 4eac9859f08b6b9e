"""What D has of a transfer's prompt already, and what of a transfer it lets others find."""

from __future__ import annotations

from pd_grpc.blocks.pool import BlockState, Holding, blocks_for
from pd_grpc.blocks.prefix_cache import PrefixCache
from pd_grpc.decode.transfer import Transfer


class PrefixReuse:
    """The prefix cache as transfers use it.

    A P names the blocks of its prompt in `Allocate.block_hashes`, before D knows the prompt; the
    client's leg has the tokens themselves, and both must come to the same names before a token is
    decoded. Only the client's tokens name what is kept.
    """

    def __init__(self, cache: PrefixCache, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size

    def names(self, transfer: Transfer, tokens: int) -> list[bytes]:
        """The names of the whole blocks among a client's first `tokens` tokens; none while nothing
        is kept."""
        assert transfer.client is not None
        if not self._cache.enabled:
            return []
        return transfer.client.chain.names(transfer.tokens, tokens // self._block_size)

    def granted(self, transfer: Transfer, holding: Holding, cached: int) -> None:
        """A transfer has its blocks, the first `cached` of which hold its KV."""
        transfer.holding = holding
        transfer.kept_blocks = cached
        transfer.cached_tokens = cached * self._block_size
        if transfer.local:
            transfer.kv_tokens = transfer.cached_tokens

    def again(self, transfer: Transfer) -> None:
        """Give a preempted transfer blocks for all its tokens up to the next decode step, and what
        KV of its own or another's is left. The newest token is computed in any case, by that step
        or, where it is the prompt's, for the first token. NoBlocks, changing nothing, if there are
        too few."""
        tokens = len(transfer.tokens)
        names = self.names(transfer, tokens - 1)
        first, state = 1, BlockState.RECEIVING
        if transfer.handed_off:
            first, state = 0, BlockState.DECODING
        blocks = blocks_for(tokens + first, self._block_size)
        transfer.holding, cached = self._cache.reserve(blocks, names, state, transfer.grant_id)
        transfer.kept_blocks = cached
        transfer.kv_tokens = cached * self._block_size

    def wanted(self, transfer: Transfer) -> tuple[tuple[int, int], ...]:
        """The runs (start, count) of logical blocks that P must send of a transfer that has its
        blocks: all of the prompt behind those that were found."""
        assert transfer.prefill is not None
        prompt = blocks_for(transfer.prefill.request.prompt_tokens, self._block_size)
        cached = transfer.cached_tokens // self._block_size
        return ((cached, prompt - cached),) if prompt > cached else ()

    def keep(self, transfer: Transfer) -> None:
        """Let others find the whole blocks of a transfer whose KV is in place: every layer of it
        verified and no sender at it any more, or computed here. Without a client's leg it keeps
        nothing yet."""
        client, holding = transfer.client, transfer.holding
        whole = transfer.kv_tokens // self._block_size
        if (
            transfer.written_to
            or client is None
            or holding is None
            or whole <= transfer.kept_blocks
        ):
            return
        self._cache.add(
            self.names(transfer, transfer.kv_tokens), holding.blocks, transfer.kept_blocks
        )
        transfer.kept_blocks = whole
