"""The outcomes of prompts are reported in few messages, without needless hashes and without a wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvoffload.cache import GroupRule, Publication, ReservedSlots
from kvoffload.client.prompt_log import (
    MAX_QUEUED,
    MESSAGE_BYTES,
    SAVED_AFTER_NS,
    SEND_AFTER_NS,
    PromptLog,
    PromptNote,
)
from kvoffload.client.settings import SECOND_NS
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import CODEC, Error, ErrorCode, Explain, Explained, Explanation, Miss
from kvoffload.protocol.insight import MAX_TAGS
from kvoffload.protocol.limits import MAX_QUERIES
from tests.kit.cache.cache_model import HYBRID, PLAIN, make_chain
from tests.kit.client.fake_wire import FakeWire, Script, make_link
from tests.kit.server.harness import register_of

CHAIN = make_chain(1, 8)
WAIT_NS = SECOND_NS


class Setting:
    def __init__(self, *, geometry: Any = PLAIN, capabilities: tuple[str, ...] = ("explain",)) -> None:
        self.wire = FakeWire()
        self.link = make_link(self.wire)
        self.script = Script(self.link, self.wire)
        self.script.join(capabilities=capabilities)
        self.log = PromptLog(self.link, register_of(geometry))
        self.heard: list[Explanation] = []

    def note(self, **changes: Any) -> None:
        given: dict[str, Any] = {"chain": CHAIN, "local": 0, "tokens": 130, "boundary": 32, "limit": 128}
        note = PromptNote(**(given | changes), on_explained=self.heard.append)
        self.log.note(note, self.script.now_ns)

    def send(self, after_ns: int = SEND_AFTER_NS) -> list[Any]:
        self.script.now_ns += after_ns
        self.log.send(self.script.now_ns, WAIT_NS)
        return self.wire.take()


def test_notes_wait_a_little_and_go_together() -> None:
    setting = Setting()
    for _ in range(3):
        setting.note()
    assert setting.send(SEND_AFTER_NS - 1) == []
    (call,) = setting.send(1)
    assert isinstance(call.message, Explain)
    assert len(call.message.queries) == 3


def test_many_go_at_once_and_one_message_at_a_time() -> None:
    setting = Setting()
    for _ in range(MAX_QUERIES + 5):
        setting.note()
    (call,) = setting.send(0)
    assert len(call.message.queries) == MAX_QUERIES
    assert setting.send() == [], "the first is not answered yet"
    setting.script.answer(call, Explained(answers=()))
    (rest,) = setting.send()
    assert len(rest.message.queries) == 5


def test_beyond_the_bound_the_oldest_are_dropped() -> None:
    setting = Setting()
    for number in range(MAX_QUEUED + 1):
        setting.note(tokens=1000 + number)
    (call,) = setting.send()
    assert call.message.queries[0].asked == 1001


def test_long_prompts_go_in_more_messages() -> None:
    setting = Setting()
    for _ in range(4):
        setting.note(chain=CHAIN[:32] * MAX_TAGS, tokens=10**6)
    (call,) = setting.send()
    assert sum(len(query.tags) for query in call.message.queries) <= MESSAGE_BYTES + 8 * MAX_TAGS
    setting.script.answer(call, Explained(answers=()))
    assert setting.send()


def test_a_query_names_what_is_missing_first_and_tags_of_what_was_asked() -> None:
    setting = Setting()
    setting.note(local=16, boundary=48, lower=16, saved_us=9, miss=Miss.NEVER_SEEN, session="a")
    (call,) = setting.send()
    (query,) = call.message.queries
    assert (query.asked, query.promised, query.lower, query.saved_us) == (114, 32, 16, 9)
    assert query.session == "a"
    assert query.missing == CHAIN[3 * 32 : 4 * 32]
    assert query.tags == b"".join(CHAIN[at : at + 8] for at in range(32, len(CHAIN), 32))


@pytest.mark.parametrize(("boundary", "limit"), [(128, 128), (112, 112), (128, 200)], ids=["all", "limit", "no hash"])
def test_where_no_more_could_have_been_promised_nothing_is_missing(boundary: int, limit: int) -> None:
    setting = Setting()
    setting.note(boundary=boundary, limit=limit)
    (call,) = setting.send()
    assert call.message.queries[0].missing == b""


def test_blocks_of_several_hashes_are_named_by_their_last() -> None:
    prefix = replace(HYBRID.groups[0], rule=GroupRule(block_size=32, reuse=ReuseRule.PREFIX))
    setting = Setting(geometry=replace(HYBRID, groups=(HYBRID.groups[1], prefix)))
    setting.note(boundary=32)
    (call,) = setting.send()
    assert (call.message.queries[0].group, call.message.queries[0].missing) == (1, CHAIN[3 * 32 : 4 * 32])


def test_of_an_endless_prompt_the_beginning_is_counted() -> None:
    setting = Setting()
    setting.note(chain=CHAIN[:32] * (MAX_TAGS + 7), tokens=10**6)
    (call,) = setting.send()
    assert len(call.message.queries[0].tags) == 8 * MAX_TAGS


def test_no_count_of_an_engine_keeps_a_message_from_being_made() -> None:
    setting = Setting()
    setting.note(tokens=5, local=16, boundary=0, lower=-3, saved_us=-1)
    setting.note(tokens=10**15, boundary=10**14, limit=10**15)
    (call,) = setting.send()
    assert CODEC.encode_call(call.message, number=1)
    assert [query.asked for query in call.message.queries] == [0, 2**32 - 1]


def test_explanations_reach_those_who_noted() -> None:
    setting = Setting()
    setting.note()
    setting.note()
    (call,) = setting.send()
    told = (Explanation(miss=Miss.EVICTED, seconds_ago=3), Explanation(miss=Miss.CLEARED))
    setting.script.answer(call, Explained(answers=told))
    assert setting.heard == list(told)


def test_a_server_that_refuses_or_goes_away_costs_nothing() -> None:
    setting = Setting()
    setting.note()
    (call,) = setting.send()
    setting.script.answer(call, Error(code=ErrorCode.BUSY, message="not now"))
    assert setting.heard == []
    setting.note()
    setting.script.link.hang_up(setting.script.now_ns, "gone")
    assert setting.send() == []


def test_a_server_that_explains_nothing_is_told_nothing() -> None:
    setting = Setting(capabilities=())
    for _ in range(2 * MAX_QUERIES):
        setting.note()
    assert setting.send() == []


def saved(records: int, *, shards: int = 1, tenant: str = "") -> Publication:
    """Records of PLAIN's only group, with one that needed no saving."""
    tickets = np.arange(records + 1, dtype=np.uint64)
    slots = ReservedSlots(memory_id=1, session=1, group=0, tickets=tickets, addresses=tickets)
    return Publication(slots, hashes=bytes(32 * len(tickets)), shards=shards, tenant=tenant)


def saved_of(call: Any) -> list[int]:
    return [int(size) for size in np.frombuffer(call.message.saved_bytes, "<u8")]


def test_saved_bytes_go_with_the_next_prompts_by_tenant() -> None:
    setting = Setting()
    setting.link.tenants = {"a": 1, "b": 2}
    for publication in (saved(3), saved(2, shards=2, tenant="b"), saved(1, tenant="nobody")):
        setting.log.note_saved(publication, setting.script.now_ns)
    setting.note(tenant="b")
    (call,) = setting.send()
    record_bytes = PLAIN.groups[0].record_bytes
    assert saved_of(call) == [4 * record_bytes, 0, 4 * record_bytes]
    assert call.message.queries[0].tenant == 2
    setting.script.answer(call, Explained(answers=(Explanation(miss=Miss.EVICTED),)))
    setting.note(tenant="nobody")
    (call,) = setting.send()
    assert (saved_of(call), call.message.queries[0].tenant) == ([], 0)


def test_saved_bytes_go_without_prompts_after_a_while() -> None:
    setting = Setting()
    setting.log.note_saved(saved(1), setting.script.now_ns)
    assert setting.send(SAVED_AFTER_NS - 1) == []
    (call,) = setting.send(1)
    assert (call.message.queries, saved_of(call)) == ((), [PLAIN.groups[0].record_bytes])
    setting.script.answer(call, Explained(answers=()))
    assert setting.send(SAVED_AFTER_NS) == []
