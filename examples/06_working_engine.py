"""An engine that works at a cache server, for whoever wants something to look at: conversations that go on.

    kvoffload serve --set memory=1GiB
    python examples/06_working_engine.py

Its own cache is small: most of what comes again is restored from the server. It ends after --turns, at Ctrl-C or at
SIGTERM.

Exit code 0: it was served, and every prompt's answer is what a cold engine computes. 1: not. 2: bad arguments.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from itertools import count
from pathlib import Path
from random import Random

import torch
from mini_engine.engine import Engine, Request
from mini_engine.kv_cache import CacheConfig
from mini_engine.model import LAYER_SETS, ModelConfig
from mini_engine.offload import BlockStore
from mini_engine.shared_store import SharedStore

from kvoffload.config import load_shared

CACHE = CacheConfig(blocks=48)
CONVERSATIONS = 12
LONGEST = 30 * CACHE.block_tokens
CHECKED = 25
"""One prompt in so many is computed by a cold engine, too."""
TOLD = 25
"""A line for so many."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", type=Path, nargs="?", help="the server's socket, if not where all look for it")
    parser.add_argument("--turns", type=int, help="prompts, then it ends")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two of them")
    return parser.parse_args()


class Conversations:
    """Somebody goes on with one of them; one that has become too long begins anew.

    The model's own answers are no part of them: a cold engine would compute those as a prompt, whose sums are rounded
    differently from those of tokens that were decoded one by one.
    """

    def __init__(self, vocabulary: int) -> None:
        self._random = Random(7)
        self._vocabulary = vocabulary
        self._tokens: dict[int, list[int]] = {}

    def choose(self) -> list[int]:
        who = self._random.randrange(CONVERSATIONS)
        tokens = self._tokens.setdefault(who, [])
        if len(tokens) > LONGEST:
            tokens.clear()
        tokens += [self._random.randrange(self._vocabulary) for _ in range(self._random.randint(8, 40))]
        return tokens


def is_right(model: ModelConfig, prompt: list[int], answer: Request) -> bool:
    """What an engine with an empty cache says."""
    cold = Engine(model, CACHE, torch.device("cpu"), BlockStore()).run(prompt, max_tokens=answer.max_tokens)
    return cold.generated == answer.generated and torch.equal(torch.stack(cold.logprobs), torch.stack(answer.logprobs))


def work(options: argparse.Namespace) -> bool:
    """Whether all that was checked was right."""
    model = ModelConfig(layers=LAYER_SETS["hybrid"])
    server = options.server or Path(load_shared(None, {}).settings.server)
    store = SharedStore(server, model, CACHE)
    engine = Engine(model, CACHE, torch.device("cpu"), store)
    if not store.client.wait_until_served(30):
        print(f"error: no server at {server}: {store.client.fault}", file=sys.stderr)
        return False
    conversations = Conversations(model.vocabulary)
    asked = reused = restored = 0
    try:
        for turn in count(1) if options.turns is None else range(1, options.turns + 1):
            prompt = conversations.choose()
            answer = engine.run(prompt, max_tokens=3)
            asked += len(prompt)
            reused += answer.reused
            restored += answer.restored_blocks
            if turn % CHECKED == 1 and not is_right(model, prompt, answer):
                print(f"turn {turn}: its answer differs from a cold engine's", file=sys.stderr)
                return False
            if turn % TOLD == 0:
                share = f"{reused / asked:.0%} of {asked:,} tokens reused"
                print(f"{turn} turns: {share}, {restored:,} blocks restored", flush=True)
            time.sleep(options.pause)
    except KeyboardInterrupt:
        pass
    finally:
        engine.sleep()
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(0 if work(parse_arguments()) else 1)
