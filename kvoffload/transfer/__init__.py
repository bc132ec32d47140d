"""transfer: moves blocks between engine memory and records, as a page map says.

It must not decide what to copy, nor know an engine, a cache or a network.
"""

from kvoffload.transfer.plain_copy import PlainCopy

__all__ = ["PlainCopy"]
