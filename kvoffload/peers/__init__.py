"""Other machines' cache servers as a tier: links to them, what travels on these, and the side that serves them.

Threads and sockets are here; what a peer may do with the memory is said by `PeerAccess` alone.
"""

from kvoffload.peers.space_table import PeerSpace, SpaceTable

__all__ = ["PeerSpace", "SpaceTable"]
