"""An engine that uses a cache server, for a look at a server at work: conversations that go on.

    kvoffload serve --set memory=1GiB
    python examples/06_working_engine.py

Its own cache is small: most prompts that come again are restored from the server. It needs numpy alone, and ends after
--turns, at Ctrl-C or at SIGTERM.

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

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from small_engine import BLOCK_TOKENS, VOCABULARY, Answer, SmallEngine

from kvoffload.config.sources import load_shared

CONVERSATIONS = 12
LONGEST = 30 * BLOCK_TOKENS
CHECKED = 25
"""One prompt in so many is computed by a cold engine, too."""
TOLD = 25
"""A line for so many, where no terminal shows a bar."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", type=Path, nargs="?", help="the server's socket, if not where all look for it")
    parser.add_argument("--turns", type=int, help="prompts, then it ends")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two of them")
    return parser.parse_args()


class Conversations:
    """Conversations that go on in turn. One that has become too long is replaced by a new one."""

    def __init__(self) -> None:
        self._random = Random(7)
        self._tokens: dict[int, list[int]] = {}

    def choose(self) -> list[int]:
        who = self._random.randrange(CONVERSATIONS)
        tokens = self._tokens.setdefault(who, [])
        if len(tokens) > LONGEST:
            tokens.clear()
        tokens += [self._random.randrange(VOCABULARY) for _ in range(self._random.randint(8, 40))]
        return tokens


class Teller:
    """Shows what has been done so far: a bar on a terminal, elsewhere a line every `TOLD` turns."""

    def __init__(self, turns: int | None) -> None:
        self._turns, self._asked, self._reused, self._restored = 0, 0, 0, 0
        self._is_shown = sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not self._is_shown)
        self._task = self._bar.add_task("waiting for the server", total=turns)
        self._bar.start()

    def tell(self, prompt: list[int], answer: Answer) -> None:
        self._turns += 1
        self._asked += len(prompt)
        self._reused += answer.reused
        self._restored += answer.restored_blocks
        share = f"{self._reused / self._asked:.0%} of {self._asked:,} tokens reused"
        line = f"{self._turns} turns: {share}, {self._restored:,} blocks restored"
        self._bar.update(self._task, advance=1, description=line)
        if not self._is_shown and self._turns % TOLD == 0:
            print(line, flush=True)

    def close(self) -> None:
        self._bar.stop()


def is_right(prompt: list[int], answer: Answer) -> bool:
    """Compares an answer bit by bit with that of an engine whose cache is empty."""
    return np.array_equal(SmallEngine(None).run(prompt).logits, answer.logits)


def work(options: argparse.Namespace) -> bool:
    """Whether all that was checked was right."""
    server = options.server or Path(load_shared(None, {}).settings.server)
    engine, teller = SmallEngine(server), Teller(options.turns)
    assert engine.client is not None
    conversations = Conversations()
    try:
        if not engine.client.wait_until_served(30):
            teller.close()
            print(f"error: no server at {server}: {engine.client.fault}", file=sys.stderr)
            return False
        for turn in count(1) if options.turns is None else range(1, options.turns + 1):
            prompt = conversations.choose()
            answer = engine.run(prompt)
            teller.tell(prompt, answer)
            if turn % CHECKED == 1 and not is_right(prompt, answer):
                print(f"turn {turn}: its answer differs from a cold engine's", file=sys.stderr)
                return False
            time.sleep(options.pause)
    except KeyboardInterrupt:
        pass
    finally:
        teller.close()
        engine.close()
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(0 if work(parse_arguments()) else 1)
