"""The decisions of the cache server: sessions, answers, events. Must not import vllm or torch.

The core is a state machine of one thread: its caller passes in time, credentials and descriptors, and it returns the
messages to send. Sockets, memory and the event loop lie around it, in `server`.
"""

from kvoffload.server.core import ServerCore
from kvoffload.server.sessions.domain import DomainSettings, TenantSettings
from kvoffload.server.sessions.outbox import SendMemory, ToConnection, ToLifeline
from kvoffload.server.sessions.session import Guest, Peer
from kvoffload.server.sessions.session_table import SessionTable
from kvoffload.server.sessions.settings import CoreSettings, ServerLimits, TcpSettings

__all__ = [
    "CoreSettings",
    "DomainSettings",
    "Guest",
    "Peer",
    "SendMemory",
    "ServerCore",
    "ServerLimits",
    "SessionTable",
    "TcpSettings",
    "TenantSettings",
    "ToConnection",
    "ToLifeline",
]
