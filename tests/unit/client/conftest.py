"""A real server in a process of its own, for all tests of a file; every test has an identity of its own in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload.cache import CacheGeometry
from kvoffload.client import ClientSettings, LinkSettings, Member
from kvoffload.client.link import Link
from kvoffload.protocol import Role
from tests.kit.cache.cache_model import HYBRID
from tests.kit.children import child
from tests.kit.client.fake_wire import FakeWire, Script, make_link
from tests.kit.server.harness import register_of

SERVER = """
import sys
from pathlib import Path
from kvoffload.cache import CacheSettings
from kvoffload.server import DomainSettings, TenantSettings
from kvoffload.server.loop import CacheServer, ServerPlan
domains = (DomainSettings(name="", tenants=(TenantSettings(name="own"), TenantSettings(name="other"))),)
memory = CacheSettings(memory_bytes=16 << 20, segment_bytes=8 << 20, extent_bytes=64 << 10)
wait_s = float(sys.argv[2])
server = CacheServer(ServerPlan(socket=Path(sys.argv[1]), memory={"": memory}, domains=domains, adopt_wait_s=wait_s))
print("serves", flush=True)
server.run()
"""
NUMBERS = itertools.count()
PATIENT = LinkSettings(acquire_deadline_s=20.0, call_deadline_s=20.0)
"""Nothing is held ready, so that counts are those of what a test does itself."""

MakeSettings = Callable[..., ClientSettings]


@pytest.fixture
def wire() -> FakeWire:
    return FakeWire()


@pytest.fixture
def link(wire: FakeWire) -> Link:
    return make_link(wire)


@pytest.fixture
def script(link: Link, wire: FakeWire) -> Script:
    return Script(link, wire)


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("server") / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves"):
        yield path


def make_settings(
    path: Path,
    *,
    geometry: CacheGeometry = HYBRID,
    name: str = "",
    engine: str = "",
    role: Role = Role.SCHEDULER,
    link: LinkSettings = PATIENT,
    step_budget_s: float = 0.001,
) -> ClientSettings:
    number = next(NUMBERS)
    member = Member(engine=engine or f"engine {number}", role=role, pid=os.getpid())
    register = None if role is Role.OBSERVER else register_of(geometry, name or f"model {number}")
    return ClientSettings(socket=path, member=member, register=register, link=link, step_budget_s=step_budget_s)
