"""Two engines, one server: the second engine's first request hits what the first one computed.

Both run the same hybrid model: attention, a sliding window and a recurrent state, whose records differ in size. A third
engine with another model shares the pool and finds nothing. Exit code 0: tokens and logprobs are equal, every bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("this example needs torch: pip install torch")
from mini_engine.engine import Engine, Request
from mini_engine.kv_cache import CacheConfig
from mini_engine.model import LAYER_SETS, ModelConfig
from mini_engine.shared_store import SharedStore
from serving import serve

CACHE = CacheConfig(blocks=64)
PROMPT = [(17 * i + 5) % ModelConfig.vocabulary for i in range(10 * CACHE.block_tokens + 4)]


def start_engine(socket: Path, model: ModelConfig) -> tuple[Engine, SharedStore]:
    store = SharedStore(socket, model, CACHE)
    engine = Engine(model, CACHE, torch.device("cpu"), store)
    assert store.client.wait_until_served(30), store.client.fault
    return engine, store


def run(name: str, socket: Path, model: ModelConfig) -> Request:
    """An engine of its own for one request."""
    engine, store = start_engine(socket, model)
    request = engine.run(PROMPT, max_tokens=4)
    print(
        f"{name:<14} reused {request.reused:3} of {len(PROMPT)} tokens, {request.restored_blocks:2} blocks restored; "
        f"tokens {request.generated}; {store.client.stats().readable} blocks in the pool"
    )
    engine.sleep()
    return request


def main() -> int:
    hybrid, other = ModelConfig(layers=LAYER_SETS["hybrid"]), ModelConfig(layers=LAYER_SETS["full"])
    with serve(memory="64MiB") as socket:
        first = run("first engine", socket, hybrid)
        stranger = run("another model", socket, other)
        second = run("second engine", socket, hybrid)
    is_equal = first.generated == second.generated and torch.equal(
        torch.stack(first.logprobs), torch.stack(second.logprobs)
    )
    print(f"tokens and logprobs equal, every bit: {'yes' if is_equal else 'NO'}")
    return 0 if is_equal and second.reused and not first.reused and not stranger.reused else 1


if __name__ == "__main__":
    sys.exit(main())
