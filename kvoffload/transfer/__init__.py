"""transfer: moves blocks between engine memory and records, as a page map says.

It must not decide what to copy, nor know an engine, a cache or a network.
"""

from kvoffload.transfer.choose_engine import compute_stream, open_engine
from kvoffload.transfer.copy_engine import CopyDirection, CopyEngine, CopyItems, FinishedCopy
from kvoffload.transfer.copy_self_test import run_copy_self_test
from kvoffload.transfer.host_engine import HostEngine

__all__ = [
    "CopyDirection",
    "CopyEngine",
    "CopyItems",
    "FinishedCopy",
    "HostEngine",
    "compute_stream",
    "open_engine",
    "run_copy_self_test",
]
