"""The engine of numpy: restored answers are those of a cold one, and what it has not lost is not asked for."""

from __future__ import annotations

import numpy as np
import pytest
from serving import serve
from small_engine import BLOCK_TOKENS, OWN_BLOCKS, VOCABULARY, SmallEngine

PROMPT = [(17 * i + 5) % VOCABULARY for i in range(8 * BLOCK_TOKENS + 3)]
OTHER = [(31 * i + 7) % VOCABULARY for i in range(OWN_BLOCKS * BLOCK_TOKENS + 1)]


def test_what_one_saved_another_restores_bit_by_bit() -> None:
    cold = SmallEngine(None).run(PROMPT)
    with serve(memory="64MiB") as socket:
        engines = [SmallEngine(socket) for _ in range(2)]
        for engine in engines:
            assert engine.client is not None
            assert engine.client.wait_until_served(60)
        first, second = engines
        computed = first.run(PROMPT)
        assert first.client is not None
        first.client.stats()
        restored = second.run(PROMPT)
        assert (computed.reused, computed.restored_blocks) == (0, 0)
        assert (restored.reused, restored.restored_blocks) == (8 * BLOCK_TOKENS, 8)
        assert np.array_equal(computed.logits, cold.logits)
        assert np.array_equal(restored.logits, cold.logits)

        # Its own cache first; what that has dropped comes from the server.
        own = second.run(PROMPT)
        assert (own.reused, own.restored_blocks) == (8 * BLOCK_TOKENS, 0)
        second.run(OTHER)
        again = second.run(PROMPT)
        assert (again.reused, again.restored_blocks) == (8 * BLOCK_TOKENS, 8)
        assert np.array_equal(again.logits, cold.logits)
        assert second.client is not None
        assert second.client.stats().leases == 0
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("tokens", [1, BLOCK_TOKENS, BLOCK_TOKENS + 1])
def test_the_last_token_is_always_computed(tokens: int) -> None:
    engine = SmallEngine(None)
    cold = engine.run(PROMPT[:tokens])
    hit = engine.run(PROMPT[:tokens])
    assert hit.reused == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert np.array_equal(hit.logits, cold.logits)


def test_another_beginning_is_another_answer() -> None:
    """A block depends on all that is before it: that of another prompt would show."""
    engine = SmallEngine(None)
    other = [PROMPT[0] + 1, *PROMPT[1:]]
    assert not np.array_equal(engine.run(PROMPT).logits, engine.run(other).logits)
