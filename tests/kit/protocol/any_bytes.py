"""Bytes of all kinds for the decoder."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import strategies as st

from kvoffload.protocol import CODEC, MESSAGES, Answer, Call, Channel, ProtocolFault, answer_fault

OPS = sorted({message.op for message in MESSAGES})


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20)
    | st.binary(max_size=100)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
    | st.just(msgpack.Timestamp(1, 2)),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)


def decode_all(frame: bytes) -> list[Any]:
    """Decodes bytes as every reader that there is. Everything that comes out is a message or an answerable fault."""
    found: list[Any] = []
    for channel in Channel:
        found += [CODEC.decode_call(frame, channel=channel), CODEC.decode_answer(frame, channel=channel)]
    for item in found:
        assert isinstance(item, Call | Answer | ProtocolFault)
        if isinstance(item, ProtocolFault):
            CODEC.encode_answer(answer_fault(item), number=item.number, boot_id=1)
            assert "\n" not in item.message
    return found
