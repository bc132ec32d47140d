"""Cached blocks and their use: look up, reserve, commit, acquire, release, evict. Must not open sockets.

`LocalCache` holds blocks in shared memory by the native core; `OffloadCache` is the contract that engines use.
"""

from kvoffload.cache.answers import (
    NO_ADDRESS,
    Acquired,
    AdoptionReport,
    CacheStats,
    CommitOutcome,
    CurvePoint,
    Departed,
    FoundEntries,
    LeasedGroup,
    LeaseFor,
    LeaseId,
    Leaving,
    ListedBlocks,
    MemoryCurve,
    PlaceUsage,
    RemovedBlocks,
    Reservation,
    Residence,
    SessionId,
    Shrunk,
    StoredBlocks,
    TenantUsage,
)
from kvoffload.cache.ask import NO_LIMIT, Ask
from kvoffload.cache.boundary import EntryKey, GroupRule, find_reach, longest_boundary, needed_blocks
from kvoffload.cache.index_reader import IndexReader
from kvoffload.cache.local_cache import LocalCache
from kvoffload.cache.local_session import LocalSession
from kvoffload.cache.offload_cache import AcquiredBlocks, BlockLease, OffloadCache, Placed, Publication, ReservedSlots
from kvoffload.cache.segment_map import SegmentMap
from kvoffload.cache.settings import (
    TENANT_LIMIT,
    TENANT_NAME_BYTES,
    CacheFiles,
    CacheGeometry,
    CacheGroup,
    CacheOwner,
    CacheSettings,
    HugePages,
    refuse_memory,
)
from kvoffload.types import AcquireOutcome

__all__ = [
    "NO_ADDRESS",
    "NO_LIMIT",
    "TENANT_LIMIT",
    "TENANT_NAME_BYTES",
    "AcquireOutcome",
    "Acquired",
    "AcquiredBlocks",
    "AdoptionReport",
    "Ask",
    "BlockLease",
    "CacheFiles",
    "CacheGeometry",
    "CacheGroup",
    "CacheOwner",
    "CacheSettings",
    "CacheStats",
    "CommitOutcome",
    "CurvePoint",
    "Departed",
    "EntryKey",
    "FoundEntries",
    "GroupRule",
    "HugePages",
    "IndexReader",
    "LeaseFor",
    "LeaseId",
    "LeasedGroup",
    "Leaving",
    "ListedBlocks",
    "LocalCache",
    "LocalSession",
    "MemoryCurve",
    "OffloadCache",
    "PlaceUsage",
    "Placed",
    "Publication",
    "RemovedBlocks",
    "Reservation",
    "ReservedSlots",
    "Residence",
    "SegmentMap",
    "SessionId",
    "Shrunk",
    "StoredBlocks",
    "TenantUsage",
    "find_reach",
    "longest_boundary",
    "needed_blocks",
    "refuse_memory",
]
