"""What is kept, and whether it may be used: look up, reserve, commit, acquire, release, evict. Must not open sockets.

The index here is plain Python over records that the engine's workers hold. It fixes the verbs; the native core takes
its place underneath.
"""

from kvoffload.cache.boundary import GroupRule, longest_boundary, needed_blocks
from kvoffload.cache.plain_index import EntryKey, Lease, PlainIndex

__all__ = ["EntryKey", "GroupRule", "Lease", "PlainIndex", "longest_boundary", "needed_blocks"]
