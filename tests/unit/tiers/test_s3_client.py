"""An answer of any kind, and anything that it does to the library, is a fault of the store and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore", reason="obstore is not installed")

from kvoffload.protocol import Counts, Stats
from kvoffload.tiers import store_process
from kvoffload.tiers.base import RecordOutcome, TierState
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.s3 import WHOLE_BYTES
from kvoffload.tiers.s3_bucket import GAP_BYTES, Ranges
from kvoffload.tiers.s3_client import S3Client
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient
from tests.kit.server.tiers import await_that
from tests.kit.tiers.fault_proxy import Fault, FaultProxy, stand_before
from tests.kit.tiers.s3_server import S3Server, await_state, make_tier
from tests.kit.tiers.tier_contract import Records, get, put


@pytest.fixture
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    with stand_before(moto.endpoint) as proxy:
        yield proxy


@pytest.fixture
def client(moto: S3Server) -> Iterator[S3Client]:
    client = S3Client(moto.settings())
    yield client
    client.close()


@pytest.mark.parametrize("fault", [Fault.HUGE, Fault.ENDLESS])
def test_an_answer_larger_than_any_memory_makes_the_store_absent_and_no_more(
    moto: S3Server, proxy: FaultProxy, fault: Fault
) -> None:
    """The library ends its process where it gets no memory; it did that to the server."""
    proxy.fault = lambda asked: fault if asked.is_list else Fault.NONE
    tier = make_tier(replace(moto.settings(), endpoint=proxy.endpoint))
    [health] = tier.health()
    assert health.state is TierState.ABSENT
    assert health.reason == "the S3 client has ended: SIGABRT"
    proxy.fault = lambda asked: Fault.NONE
    await_state(tier, TierState.READY)
    proxy.is_over.set()
    tier.close()


def test_no_answer_of_a_store_ends_the_server(tmp_path: Path) -> None:
    """A server process of its own, and an endpoint that may be a proxy that asks people to log in."""
    keys = tmp_path / "keys"
    keys.write_text("[default]\naws_access_key_id = one\naws_secret_access_key = two\n")
    keys.chmod(0o600)
    with stand_before("http://127.0.0.1:1") as proxy:
        proxy.fault = lambda asked: Fault.HUGE
        settings = {"server": tmp_path / "s", "memory": "128MiB", "segment_size": "64MiB", "s3": "s3://bucket/x"}
        settings |= {"s3_endpoint": proxy.endpoint, "s3_region": "one", "s3_credentials_file": keys}
        command = [sys.executable, "-m", "kvoffload", "serve", "--adopt-wait", "0"]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                line = next((line for line in server.stderr if "is absent" in line), "the server has ended")
                assert line.endswith("is absent: the S3 client has ended: SIGABRT\n")
                with contextlib.closing(RawClient(tmp_path / "s", register_of())) as client:
                    save(client, hashes_of(3), 5)
                    assert isinstance(client.ask(Stats()), Counts)
                assert server.poll() is None
            finally:
                server.kill()


@pytest.mark.parametrize("record_bytes", [1000, WHOLE_BYTES])
def test_a_record_larger_than_any_memory_is_a_miss(moto: S3Server, proxy: FaultProxy, record_bytes: int) -> None:
    settings = replace(moto.settings(), endpoint=proxy.endpoint, connections=1)
    tier = make_tier(settings)
    written, read = (Records(0, 3, record_bytes, filled=filled) for filled in (True, False))
    assert put(tier, written).count(RecordOutcome.WRITTEN) == 3
    proxy.fault = lambda asked: Fault.HUGE if asked.verb == "GET" and not asked.is_list else Fault.NONE
    ended = get(tier, read)
    assert ended.count(RecordOutcome.FOUND) == 0
    assert not read.memory.any()
    proxy.fault = lambda asked: Fault.NONE
    await_that(lambda: get(tier, read).count(RecordOutcome.FOUND) == 3)
    assert np.array_equal(read.memory, written.memory)
    proxy.is_over.set()
    tier.close()


def test_a_process_that_ends_or_hangs_is_replaced(moto: S3Server) -> None:
    tier = make_tier(replace(moto.settings(), call_timeout_s=1.0, connections=1))
    written, read = (Records(0, 3, 1000, filled=filled) for filled in (True, False))
    assert put(tier, written).count(RecordOutcome.WRITTEN) == 3
    for number in (signal.SIGKILL, signal.SIGSTOP):
        before = children()
        assert before
        for pid in before:
            os.kill(pid, number)
        await_that(lambda: get(tier, read).count(RecordOutcome.FOUND) == 3)
        await_that(lambda before=before: not before & children())
        assert np.array_equal(read.memory, written.memory)
        read.memory[:] = 0
    tier.close()
    assert not children()


def children() -> set[int]:
    """The processes of this one that ask a bucket."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"store_child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
    return found


def test_the_library_is_not_in_the_process_that_has_the_tier() -> None:
    code = """
import sys
from kvoffload.config.s3_address import S3Address
from kvoffload.s3_keys import S3Keys
from kvoffload.tiers.s3 import S3Settings
tier = S3Settings(address=S3Address(bucket="bucket"), endpoint="http://127.0.0.1:1",
               keys=S3Keys(key_id="a", secret="s3cret-word")).open_tier()
assert tier.wait_open(60)
print(tier.health()[0].reason)
assert not [name for name in sys.modules if "obstore" in name]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("Connection refused\n", "")


def test_secrets_are_not_on_the_command_line_of_the_process(client: S3Client) -> None:
    [pid] = children()
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"store_child" in line
    assert b"a-secret-of-the-tests" not in line


def test_objects_pass_through_shared_memory_as_they_are(client: S3Client) -> None:
    client.begin()
    whole = [(f"object-{at}", [bytes([at]) * 10, bytes(range(100))]) for at in range(40)]
    assert client.put_new(whole) == [True] * 40
    paths = [path for path, _ in whole]
    assert client.has([*paths, "absent"]) == [True] * 40 + [False]
    found = client.get(["absent", *paths], 50)
    assert found[0] is None
    assert [bytes(value or b"") for value in found[1:]] == [b"".join(parts)[:50] for _, parts in whole]
    ranges = [
        Ranges(path=paths[1], starts=[5, 100, 0], sizes=[10, 100, 3]),
        Ranges(path="absent", starts=[0], sizes=[7]),
        Ranges(path=paths[2], starts=[GAP_BYTES + 110], sizes=[4]),
        Ranges(path=paths[2], starts=[0], sizes=[4]),
    ]
    got = client.get_ranges(ranges)
    assert [None if some is None else list(map(bytes, some)) for some in got] == [
        [b"\1" * 5 + bytes(range(5)), bytes(range(90, 100)), b"\1" * 3],
        None,
        [b""],
        [b"\2" * 4],
    ]
    # The bytes that an earlier call returned are still there.
    assert bytes(found[1] or b"") == b"\0" * 10 + bytes(range(40))
    [head] = client.get_head([paths[3]], 12)
    assert bytes(head or b"") == b"\3" * 10 + b"\0\1"


def test_an_object_is_replaced_in_the_version_that_was_read(client: S3Client) -> None:
    client.begin()
    first = client.put_version("changed", b"first", "")
    assert first
    assert client.get_version("changed", 4) is None
    assert client.get_version("changed", 5) == (bytearray(b"first"), first)
    second = client.put_version("changed", b"second", first)
    assert second
    assert client.put_version("changed", b"third", first) is None
    assert client.get_version("changed", 100) == (bytearray(b"second"), second)
    level = client.list_level("")
    assert [(one.path, one.size_bytes) for one in level.objects if one.path == "changed"] == [("changed", 6)]
    assert ("changed", 6) in client.list_after("", "", 10)
    assert client.delete(["changed", "absent"]) == [True, True]
    assert client.get_version("changed", 100) is None


@pytest.mark.parametrize("told", [None, 3, {}, ["x"], [[[]]], [-2], [51], [True, False]])
def test_an_answer_of_another_form_is_a_fault(client: S3Client, monkeypatch: pytest.MonkeyPatch, told: object) -> None:
    client.begin()
    # Takes the memory, which is mapped by a question of its own.
    client.get(["there"], 50)
    client.begin()
    monkeypatch.setattr(store_process.json, "loads", lambda line: {"answer": told})
    with pytest.raises(StoreFaultError, match="does not answer as it should"):
        client.get(["there"], 50)
    with pytest.raises(StoreFaultError, match="does not answer as it should"):
        client.get_ranges([Ranges(path="there", starts=[0], sizes=[50])])
    with pytest.raises(StoreFaultError, match="does not answer as it should"):
        client.list_level("1")
    with pytest.raises(StoreFaultError, match="does not answer as it should"):
        client.list_after("1", "", 5)
