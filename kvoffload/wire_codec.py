"""The protocol's codec as both ends of a wire use it: plain frames are read and written by the native core."""

from __future__ import annotations

from kvoffload import native
from kvoffload.protocol import MESSAGES, Codec

CODEC = Codec(MESSAGES, make_plain=native.PlainFrames)
