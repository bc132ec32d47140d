"""A link's subscription: asked for again after every join and refusal, with an inventory once the server agrees."""

from __future__ import annotations

from kvoffload.client.inventory import Heard, InventoryBegun
from kvoffload.client.settings import SECOND_NS, LinkSettings
from kvoffload.protocol import Error, ErrorCode, EventsLost, ListBlocks, Role, Subscribe, Subscribed
from kvoffload.protocol.message import Event
from tests.kit.client.fake_wire import FakeWire, Script, make_link


def test_a_subscription_outlives_its_server(wire: FakeWire) -> None:
    told: list[tuple[Event, int]] = []
    link = make_link(wire, role=Role.OBSERVER, on_event=lambda *event: told.append(event))
    script = Script(link, wire)
    script.join()
    link.subscribe(Subscribe(name_spaces=(7,)), script.now_ns)
    (call,) = wire.take()
    script.answer(call, Subscribed())
    script.send(EventsLost(count=3), 1)
    link.hang_up(script.now_ns, "gone")
    script.now_ns += SECOND_NS
    (again,) = script.join(boot_id=2)
    assert again.message == Subscribe(name_spaces=(7,))
    assert told == [(EventsLost(count=3), 1), (EventsLost(count=0), 0)]


INVENTORY = ("adopt", "events", "inventory")


def test_an_inventory_begins_when_the_server_has_agreed_to_tell_events(wire: FakeWire) -> None:
    told: list[Heard] = []
    link = make_link(wire, role=Role.OBSERVER, on_event=lambda event, _: told.append(event))
    script = Script(link, wire)
    script.join(capabilities=INVENTORY)
    link.subscribe(Subscribe(name_spaces=(7,)), script.now_ns, with_inventory=True)
    assert link.begin_inventory(script.now_ns)
    (call,) = wire.take()
    assert (call.message, told) == (Subscribe(name_spaces=(7,)), [])
    script.answer(call, Subscribed())
    (listing,) = wire.take()
    assert (listing.message, told) == (ListBlocks(name_space=7), [InventoryBegun()])


def test_a_refused_subscription_has_no_inventory_and_is_asked_for_again(wire: FakeWire) -> None:
    told: list[Heard] = []
    link = make_link(wire, role=Role.OBSERVER, on_event=lambda event, _: told.append(event))
    script = Script(link, wire)
    script.join(capabilities=INVENTORY)
    link.subscribe(Subscribe(name_spaces=(7,)), script.now_ns, with_inventory=True)
    for _ in range(3):
        (call,) = wire.take()
        assert call.message == Subscribe(name_spaces=(7,))
        script.answer(call, Error(code=ErrorCode.BUSY, message="too many", about_op=Subscribe.op))
        script.pass_time(0.5)
        assert (wire.take(), told) == ([], [])
        script.pass_time(0.5)
    (call,) = wire.take()
    script.answer(call, Subscribed())
    assert told == [EventsLost(count=0), InventoryBegun()]
    assert [one.message for one in wire.take()] == [ListBlocks(name_space=7)]
    script.pass_time(1)
    assert wire.take() == []


def test_a_subscription_without_an_answer_is_asked_for_again(wire: FakeWire) -> None:
    told: list[Heard] = []
    link = make_link(wire, role=Role.OBSERVER, on_event=lambda event, _: told.append(event))
    script = Script(link, wire)
    script.join(capabilities=INVENTORY)
    link.subscribe(Subscribe(name_spaces=(7,)), script.now_ns, with_inventory=True)
    wire.take()
    script.look_for(LinkSettings().call_deadline_s)
    wire.take()
    script.pass_time(1)
    *_, call = wire.take()
    assert (call.message, told) == (Subscribe(name_spaces=(7,)), [])
    script.answer(call, Subscribed())
    assert told == [EventsLost(count=0), InventoryBegun()]


def test_an_observer_that_names_no_identity_has_no_inventory(wire: FakeWire) -> None:
    told: list[Heard] = []
    link = make_link(wire, role=Role.OBSERVER, on_event=lambda event, _: told.append(event))
    script = Script(link, wire)
    script.join(capabilities=INVENTORY)
    link.subscribe(Subscribe(), script.now_ns, with_inventory=True)
    (call,) = wire.take()
    script.answer(call, Subscribed())
    assert not link.begin_inventory(script.now_ns)
    assert told == []
