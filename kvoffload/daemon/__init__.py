"""What the cache server decides: sessions, answers, events. Must not import vllm or torch.

The core is a state machine of one thread: time, credentials and descriptors are handed in, what is to be sent comes
out. Sockets, memory and the event loop lie around it, in `server`.
"""

from kvoffload.daemon.domain import DomainTerms, TenantTerms
from kvoffload.daemon.served_cache import ServedCache
from kvoffload.daemon.server_core import ServerCore
from kvoffload.daemon.server_terms import CoreTerms, RemoteTerms, ServerLimits
from kvoffload.daemon.session import Guest, OwnedDescriptor, Peer
from kvoffload.daemon.session_table import SessionTable
from kvoffload.daemon.to_send import SendMemory, ToConnection, ToLifeline

__all__ = [
    "CoreTerms",
    "DomainTerms",
    "Guest",
    "OwnedDescriptor",
    "Peer",
    "RemoteTerms",
    "SendMemory",
    "ServedCache",
    "ServerCore",
    "ServerLimits",
    "SessionTable",
    "TenantTerms",
    "ToConnection",
    "ToLifeline",
]
