"""No act of a user of one domain costs a client of another its blocks or their bytes, or ends the server.

The messages, and what is false about them, come from the protocol's catalogue alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffload.protocol import (
    MESSAGES,
    Acquire,
    AcquireEntries,
    ClientMessage,
    Credits,
    Explain,
    Inspect,
    Mark,
    Register,
    Stats,
)
from kvoffload.protocol.message import Message
from tests.kit.hostile.forging import forge_in_turn, forge_one
from tests.kit.hostile.scene import ACTS, BLOCKS, HostileProcess, Scene, open_scene

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
ALL = {"blocks": BLOCKS, "right": BLOCKS}
TOGETHER = 100
CYCLES = 25
CHANNELS = ("control", "express", "lifeline")


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with open_scene() as made:
        yield made


@pytest.fixture(scope="module")
def hostile(scene: Scene) -> Iterator[HostileProcess]:
    with scene.hostile() as made:
        yield made


def channels_of(message: type[Message]) -> list[str]:
    """Where it belongs, and of those two channels where it does not. What no client says is refused by its number."""
    named = {channel.value for channel in message.channels}
    is_beside = issubclass(message, ClientMessage) and named & {"control", "express"}
    return sorted(named | {"control", "express"} if is_beside else named)


def assert_it_lives(scene: Scene) -> None:
    """And takes nothing that it was told for a fault of its own."""
    assert scene.is_served()
    assert scene.read_faults() == ""


def test_the_hostile_user_has_a_domain_of_its_own(scene: Scene, hostile: HostileProcess) -> None:
    assert hostile.own["domain"] == "blue"
    assert scene.known.names[0] == "red"
    assert scene.check() == ALL


@pytest.mark.parametrize("message", [Acquire, AcquireEntries, Credits, Explain, Inspect, Mark, Register, Stats])
def test_what_is_not_forged_is_served(scene: Scene, hostile: HostileProcess, message: type[Message]) -> None:
    """If these were refused, forged messages would be refused for another reason."""
    right = next(forge_in_turn([message], scene.known))
    # A client that is not answered soon joins again: on a busy machine that may happen to any client.
    channel = message.channels[0].value
    assert any(hostile.say([(channel, right)])["served"] for _ in range(20))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_no_forged_field_of_a_message_takes_anything(
    scene: Scene, hostile: HostileProcess, message: type[Message]
) -> None:
    for channel in channels_of(message):
        forged = forge_in_turn([message], scene.known)
        while some := [(channel, one) for one in islice(forged, TOGETHER)]:
            hostile.say(some)
        assert scene.check() == ALL
    assert_it_lives(scene)


@given(st.lists(st.tuples(st.sampled_from(CHANNELS), st.integers(0, 2**64 - 1)), min_size=25, max_size=75))
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_forged_messages_together_take_anything(
    scene: Scene, hostile: HostileProcess, seeds: list[tuple[str, int]]
) -> None:
    """50 of them at a time, about: the 20,000 times of a campaign are a million messages."""
    hostile.say([(channel, forge_one(MESSAGES, scene.known, Random(seed))) for channel, seed in seeds])
    assert scene.check() == ALL
    assert_it_lives(scene)


@pytest.mark.parametrize("act", ACTS)
def test_nothing_that_a_user_does_takes_anything(scene: Scene, hostile: HostileProcess, act: str) -> None:
    done = 0
    for _ in range(CYCLES):
        hostile.begin(act)
        assert scene.check() == ALL
        done += bool(hostile.end()[act])
    assert done
    assert scene.check() == ALL
    assert_it_lives(scene)


def test_nothing_that_a_user_does_together_takes_anything(scene: Scene) -> None:
    """The hostile process begins again, and another is killed in the middle of its acts."""
    for _ in range(2):
        with scene.hostile() as hostile:
            for _ in range(CYCLES):
                hostile.begin()
                assert scene.check() == ALL
                assert set(hostile.end()) == set(ACTS)
            hostile.begin()
        assert scene.check() == ALL
    assert_it_lives(scene)


def test_the_index_cannot_be_written_to_in_any_way(hostile: HostileProcess) -> None:
    written = hostile.act("write")["write"]
    assert written["kvoffload-index"] == 0
    assert written["kvoffload"] > 0, "the slots of its own domain are there to be written to"


def test_an_honest_client_sees_what_is_taken_from_it() -> None:
    """Without this the other tests would show nothing."""
    with open_scene() as scene:
        assert scene.check() == ALL
        scene.tell_honest("spoil")
        assert scene.check() == {"blocks": BLOCKS, "right": BLOCKS - 1}
