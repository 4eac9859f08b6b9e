"""What attempts of one request do to each other, and to others, on real sockets."""

from __future__ import annotations

from tests.router.pairs import STUCK, go_on_elsewhere, pairs, saying, text_of


async def test_a_decode_alone_knows_each_attempt_by_a_name_of_its_own() -> None:
    """One that still has an attempt given up, for its cancel is under way, refuses no other."""
    async with pairs(aggregated=True) as site:
        go_on_elsewhere(site, saying(2, STUCK))
        name = "n" * 128
        messages = await site.answer(request_id=name)
        assert text_of(messages) == "héllo" and messages[0].request_id == name
        (first,), (second,) = site.d1.requests, site.d2.requests
        assert first.request_id == name
        assert second.request_id not in ("", name) and len(second.request_id) <= 128
