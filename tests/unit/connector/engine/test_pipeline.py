"""Facts that stages of a pipeline tell each other: bounded, checked, and once."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.step_plan import GroupFacts
from kvoffload.connector.engine.pipeline import (
    FRAME_BYTES,
    MAX_FAULT_LETTERS,
    Pipeline,
    Stage,
    combine_weights,
    decode_stage,
    encode_stage,
    join_ranks,
    join_stages,
    name_pipeline,
)
from kvoffload.errors import IdentityError, RegistrationError, UnsupportedError
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol.limits import MAX_GROUPS, MAX_IDENTITY
from tests.kit.connector.facts import group_facts


def sized(group: GroupFacts, record_bytes: int, replicas: int = 1) -> GroupFacts:
    return replace(group, record_bytes=record_bytes, replicas=replicas)


WINDOW = group_facts(1, ReuseRule.WINDOW, block_size=8, window=1 << 40)
STAGE = Stage(fingerprint=b"f" * 32, groups=(sized(group_facts(0), 64, 2), sized(WINDOW, 1 << 40)))
OTHER = Stage(fingerprint=b"g" * 32, groups=(sized(group_facts(0), 65, 2), sized(WINDOW, 1, 4)))
MANY = tuple(sized(replace(WINDOW, index=at, name=f"group {at}"), 1 << 40, 8) for at in range(MAX_GROUPS))
ONE_GROUP = b"\x95\xc4\x00\x91\x96\x00\x01\x00\x00\x01\x01\xa0\xc4\x00\x90"
"""A rank's word with one group of six numbers."""


@pytest.mark.parametrize(
    "stage",
    [
        STAGE,
        Stage(fault="no memory"),
        Stage(fault="\N{PILE OF POO}" * MAX_FAULT_LETTERS),
        Stage(fingerprint=b"f" * 32, groups=MANY, weights=b"w" * 32),
        Stage(fingerprint=b"f" * 32, groups=STAGE.groups, weights=b"w" * 32),
        Stage(groups=MANY, described={f"{at:030}": "v" * 120 for at in range(MAX_IDENTITY)}),
    ],
    ids=["stage", "fault", "long-fault", "many-groups", "weights", "described"],
)
def test_a_stage_arrives_in_a_frame_of_one_size(stage: Stage) -> None:
    frame = encode_stage(stage)
    assert len(frame) == FRAME_BYTES
    assert decode_stage(frame) == stage


def test_more_groups_than_a_frame_holds_are_refused() -> None:
    with pytest.raises(RegistrationError, match="too many"):
        encode_stage(Stage(groups=(*MANY, group_facts(MAX_GROUPS))))


def frame_of(content: bytes) -> bytes:
    return (len(content).to_bytes(2, "little") + content).ljust(FRAME_BYTES, b"\0")


def test_a_group_is_six_numbers() -> None:
    (group,) = decode_stage(frame_of(ONE_GROUP)).groups
    assert (group.index, group.rule.block_size, group.record_bytes, group.replicas) == (0, 1, 1, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x95\xc4\x00\x90",
        b"\x92\xc4\x00\x90",
        b"\x95\xa0\x90\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\x96\x00\x01\x00\x00\xff\x01\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\x96\x00\x01\x00\x00\xa0\x01\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\x96\x00\x01\x00\x00\xc3\x01\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\x96\x00\x01\x63\x00\x01\x01\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\x95\x00\x01\x00\x00\x01\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\x01\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\x96\x00\x01\x00\x00\x01\x00\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x91\x96\x00\x01\x00\x00\x01\xa1\x31\xa0\xc4\x00\x90",
        b"\x95\xc4\x21" + b"f" * 33 + b"\x90\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\xdd\xff\xff\xff\xff\xa0\xc4\x00\x90",
        b"\x95\xc4\x00\x90\xa0\xa0\x90",
        b"\x95\xc4\x00\x90\xa0\xc4\x21" + b"w" * 33 + b"\x90",
        b"\x95\xc4\x00\x90\xa0\xc4\x00\x91\x92\xa1n\x01",
        b"\x95\xc4\x00\x90\xa0\xc4\x00\x91\x91\xa1n",
        b"\x95\xc4\x00\x90\xa0\xc4\x00\x01",
    ],
    ids=[
        *("empty", "no-msgpack", "cut", "two", "text", "negative", "text-size", "flag-size", "no-rule", "cut-group"),
        *("no-group", "no-replica", "replicas-text", "long-name", "huge-array", "weights-text", "long-weights"),
        *("described-number", "described-alone", "nothing-described"),
    ],
)
def test_what_is_no_stage_is_refused(content: bytes) -> None:
    with pytest.raises(RegistrationError, match="sent a malformed registration"):
        decode_stage(frame_of(content))


def test_more_than_a_frame_holds_is_refused() -> None:
    with pytest.raises(RegistrationError, match="takes 20140 bytes, allowed are 16382"):
        encode_stage(Stage(described={str(at): "v" * 1000 for at in range(20)}))


def test_stages_meet_in_their_order() -> None:
    assert Pipeline(lambda frame: [encode_stage(OTHER), frame]).meet(STAGE) == [OTHER, STAGE]


def test_ranks_of_a_stage_with_other_groups_are_refused() -> None:
    assert join_ranks([STAGE, STAGE, OTHER, OTHER], stage_ranks=2) == join_stages([STAGE.groups, OTHER.groups])
    replicas = tuple(replace(group, replicas=1) for group in STAGE.groups)
    for groups in (OTHER.groups, STAGE.groups[:1], replicas):
        with pytest.raises(IdentityError, match="ranks 2 and 3 have different KV cache groups"):
            join_ranks([STAGE, STAGE, STAGE, Stage(fingerprint=b"f" * 32, groups=groups)], stage_ranks=2)


def test_ranks_of_another_machine_are_told_by_their_numbers_in_the_engine() -> None:
    with pytest.raises(IdentityError, match="ranks 6 and 7 have different KV cache groups"):
        join_ranks([STAGE, STAGE, STAGE, OTHER], stage_ranks=2, first=4)


# ---- the session's groups ----


def list_joined(*stages: tuple[GroupFacts, ...]) -> list[tuple[int, int, int]]:
    return [(group.index, group.stage, group.record_bytes) for group in join_stages(stages)]


def test_one_stages_groups_are_the_sessions() -> None:
    assert join_stages([STAGE.groups]) == STAGE.groups


def test_each_stage_has_groups_of_its_own_in_the_order_of_the_block_tables() -> None:
    assert list_joined(STAGE.groups, OTHER.groups) == [(0, 0, 64), (0, 1, 65), (1, 0, 1 << 40), (1, 1, 1)]


def test_a_group_without_layers_on_a_stage_is_none_of_that_stages() -> None:
    full, window = STAGE.groups
    assert list_joined((full, window), (full,), (window,)) == [
        (0, 0, 64),
        (0, 1, 64),
        (1, 0, 1 << 40),
        (1, 2, 1 << 40),
    ]


def test_each_stage_has_equal_ranks_of_its_own() -> None:
    assert [group.replicas for group in join_stages([STAGE.groups, OTHER.groups])] == [2, 2, 1, 4]


def test_stages_that_keep_blocks_by_different_rules_are_refused() -> None:
    other = group_facts(0, ReuseRule.WINDOW, window=8)
    with pytest.raises(IdentityError, match="stages 0 and 2 keep blocks of group 0 by different rules"):
        join_stages([STAGE.groups, OTHER.groups, (other,)])


def test_more_groups_of_all_stages_than_a_session_has_are_refused() -> None:
    assert len(join_stages([MANY[:32]] * 2)) == MAX_GROUPS
    with pytest.raises(UnsupportedError, match="have 66 KV cache groups in all, allowed are 64"):
        join_stages([MANY[:22]] * 3)


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
    # Former versions kept other groups under this name.
    assert name_pipeline([b"f" * 32, b"g" * 32]) != sha256(b"f" * 32 + b"g" * 32).digest()
    assert len({name_pipeline(names) for names in ([b"f", b"g"], [b"g", b"f"], [b"f"], [b"g"])}) == 4


def test_an_engines_name_tells_its_weights_if_all_ranks_know_them() -> None:
    assert combine_weights([b"v", b"w"]) != combine_weights([b"w", b"v"]) != b""
    assert combine_weights([b"v", b""]) == b""
    for names in ([b"f" * 32], [b"f" * 32, b"g" * 32]):
        ways = {name_pipeline(names, weights) for weights in (b"", b"v" * 32, b"w" * 32)}
        assert len(ways) == 3
        assert name_pipeline(names) in ways
