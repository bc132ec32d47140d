"""How much a peer may send. Checked before anything is made from its numbers."""

from __future__ import annotations

from kvoffload.units import MIB

FRAME_BYTES = 8 * MIB
"""Most bytes of one message on the control or the express channel."""
PACKET_BYTES = 64 << 10
"""Most bytes of one message on the lifeline, as a sequenced packet must fit a socket's buffer."""
MAX_BLOCKS = 131_072
"""Hashes in a request's chain: 4 MiB, two million tokens in blocks of 16."""
MAX_BATCH = 65_536
"""Blocks in one message that has several values for each; four of them still fit a frame."""
MAX_LEASES = 4096
MAX_GROUPS = 64
MAX_SHARDS = 64
MAX_CAPABILITIES = 64
MAX_IDENTITY = 64
MAX_TENANTS = 256
MAX_PLACES = 64
MAX_TIERS = 8
MAX_QUERIES = 32
MAX_MODELS = 32
MAX_LEDGER_ROWS = 96
MAX_NAMED_COUNTS = 64
MAX_MEMORY_SIZES = 16
MAX_TIMINGS = 64
MAX_REPORT = 64 << 10
"""Most bytes of a worker's report about the tensors that it registered."""
MAX_FORMER = 64
"""Most memories of former servers that a process can name."""
MAX_SEGMENTS = 65_536
MAX_PACKET_SEGMENTS = 250
"""The kernel passes at most 253 descriptors at once; lock and index go with the first ones."""
NAME_BYTES = 128
LINE_BYTES = 512

ARRAY_ITEMS = 256
"""Items of any array; msgpack makes room for as many as a header says."""
FRAME_ARRAYS = 512
"""Arrays in one frame, and with that its nesting. Objects made of a frame cost far more than its bytes."""
