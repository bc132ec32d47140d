"""What the cache server decides: sessions, answers, events. Must not import vllm or torch.

The core is a state machine of one thread: time, credentials and descriptors are handed in, what is to be sent comes
out. Sockets, memory and the event loop lie around it, in `server`.
"""

from kvoffload.daemon.domain import DomainTerms, TenantTerms
from kvoffload.daemon.served_cache import ServedCache
from kvoffload.daemon.server_core import ServerCore
from kvoffload.daemon.server_terms import CoreTerms, ServerLimits
from kvoffload.daemon.session import OwnedDescriptor, Peer
from kvoffload.daemon.session_table import SessionTable
from kvoffload.daemon.to_send import SendMemory, ToConnection, ToLifeline

__all__ = [
    "CoreTerms",
    "DomainTerms",
    "OwnedDescriptor",
    "Peer",
    "SendMemory",
    "ServedCache",
    "ServerCore",
    "ServerLimits",
    "SessionTable",
    "TenantTerms",
    "ToConnection",
    "ToLifeline",
]
