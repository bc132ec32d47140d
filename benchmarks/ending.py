"""The end of a benchmark that is told to stop."""

from __future__ import annotations

import signal
import sys


def end_in_order(number: int, _frame: object) -> None:
    """Handles a signal: the benchmark ends what it has started on its way out, without a second signal."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
