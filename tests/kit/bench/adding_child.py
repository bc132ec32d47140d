"""A child for the tests of `Child`."""

from __future__ import annotations

import sys

from kvoffload.bench.child import answer_commands, say_ready


def main(start: str) -> None:
    first = int(start)
    say_ready()
    answer_commands({"add": lambda number: first + number, "die": lambda: sys.exit(0)})
