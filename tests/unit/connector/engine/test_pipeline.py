"""What stages of a pipeline tell each other: bounded, checked, and once."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.engine.pipeline import (
    FRAME_BYTES,
    MAX_FAULT_LETTERS,
    MAX_GROUPS,
    Pipeline,
    Stage,
    combine_weights,
    decode_stage,
    encode_stage,
    name_pipeline,
)
from kvoffload.errors import IdentityError, RegistrationError

STAGE = Stage(fingerprint=b"f" * 32, record_bytes=(64, 1 << 40), replicas=(2, 1))
OTHER = Stage(fingerprint=b"g" * 32, record_bytes=(65, 1), replicas=(2, 4))


@pytest.mark.parametrize(
    "stage",
    [
        STAGE,
        Stage(fault="no memory"),
        Stage(fault="\N{PILE OF POO}" * MAX_FAULT_LETTERS),
        Stage(
            fingerprint=b"f" * 32, record_bytes=(1 << 40,) * MAX_GROUPS, weights=b"w" * 32, replicas=(8,) * MAX_GROUPS
        ),
        Stage(fingerprint=b"f" * 32, record_bytes=(1,), weights=b"w" * 32, replicas=(1,)),
    ],
    ids=["stage", "fault", "long-fault", "many-groups", "weights"],
)
def test_a_stage_arrives_in_a_frame_of_one_size(stage: Stage) -> None:
    frame = encode_stage(stage)
    assert len(frame) == FRAME_BYTES
    assert decode_stage(frame) == stage


def test_more_groups_than_a_frame_holds_are_refused() -> None:
    with pytest.raises(RegistrationError, match="too many"):
        encode_stage(Stage(record_bytes=(1 << 40,) * 1000))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x94\xc4\x00\x90",
        b"\x92\xc4\x00\x90",
        b"\x95\xa0\x90\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\xff\xa0\xc4\x00\x91\x01",
        b"\x95\xc4\x00\x91\xa0\xa0\xc4\x00\x91\x01",
        b"\x95\xc4\x21" + b"f" * 33 + b"\x90\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\xdd\xff\xff\xff\xff\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x90\xa0\xa0\x90",
        b"\x95\xc4\x00\x90\xa0\xc4\x21" + b"w" * 33 + b"\x90",
        b"\x95\xc4\x00\x91\x01\xa0\xc4\x00\x91\x00",
        b"\x95\xc4\x00\x91\x01\xa0\xc4\x00\x91\xa1\x31",
        b"\x95\xc4\x00\x91\x01\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x90\xa0\xc4\x00\x01",
    ],
    ids=[
        *("empty", "no-msgpack", "cut", "two", "text", "negative", "text-size", "long-name", "huge-array"),
        *("weights-text", "long-weights", "no-replica", "replicas-text", "fewer-replicas", "replicas-number"),
    ],
)
def test_what_is_no_stage_is_refused(content: bytes) -> None:
    with pytest.raises(RegistrationError, match="what is none"):
        decode_stage((len(content).to_bytes(2, "little") + content).ljust(FRAME_BYTES, b"\0"))


def test_stages_meet_in_their_order() -> None:
    assert Pipeline(lambda frame: [encode_stage(OTHER), frame]).meet(STAGE) == [OTHER, STAGE]


def test_stages_with_other_groups_are_refused() -> None:
    less = Stage(fingerprint=b"g" * 32, record_bytes=(64,), replicas=(1,))
    with pytest.raises(IdentityError, match="rank 1 of the engine has 1 KV cache groups, this one 2"):
        Pipeline(lambda frame: [frame, encode_stage(less)]).meet(STAGE)


def test_who_cannot_register_says_so_once_and_only_if_the_others_wait() -> None:
    told: list[Stage] = []

    def exchange(frame: bytes) -> list[bytes]:
        told.append(decode_stage(frame))
        return [frame]

    pipeline = Pipeline(exchange)
    pipeline.withdraw(ValueError())
    pipeline.withdraw(ValueError("again"))
    assert told == [Stage(fault="ValueError")]
    pipeline = Pipeline(exchange)
    pipeline.meet(STAGE)
    pipeline.withdraw(ValueError("too late"))
    assert told[1:] == [STAGE]


def test_a_pipeline_has_the_name_of_all_its_stages_in_their_order() -> None:
    assert name_pipeline([b"f" * 32]) == b"f" * 32
    assert len({name_pipeline(names) for names in ([b"f", b"g"], [b"g", b"f"], [b"f"], [b"g"])}) == 4


def test_an_engines_name_tells_its_weights_if_all_ranks_know_them() -> None:
    assert combine_weights([b"v", b"w"]) != combine_weights([b"w", b"v"]) != b""
    assert combine_weights([b"v", b""]) == b""
    for names in ([b"f" * 32], [b"f" * 32, b"g" * 32]):
        ways = {name_pipeline(names, weights) for weights in (b"", b"v" * 32, b"w" * 32)}
        assert len(ways) == 3
        assert name_pipeline(names) in ways
