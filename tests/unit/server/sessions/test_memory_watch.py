"""When memory counts as short: by made-up files of the kernel."""

from __future__ import annotations

from pathlib import Path

from kvoffload.server.sessions.memory_watch import FAR_WAIT_S, NEAR_WAIT_S, MemoryWatch
from kvoffload.units import GIB, MIB


class Machine:
    """A machine of 64 GiB, and a cgroup of version 2 within it. Time goes by when the test says so."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 100.0
        self._write("proc/self/mountinfo", f"30 20 0:26 / {root}/sys/fs/cgroup rw - cgroup2 cgroup2 rw")
        self._write("proc/self/cgroup", "0::/pod")
        self._write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0")
        self.set_available(60 * GIB)
        self.watch = MemoryWatch(lambda: self.now_s, root=root)

    def set_available(self, size_bytes: int) -> None:
        self._write("proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {size_bytes // 1024} kB")

    def limit(self, *, used: int, most: int | str = "max", high: int | str = "max") -> None:
        self._write("sys/fs/cgroup/pod/memory.max", str(most))
        self._write("sys/fs/cgroup/pod/memory.high", str(high))
        self._write("sys/fs/cgroup/pod/memory.current", str(used))

    def press(self, waited_us: int) -> None:
        self._write("sys/fs/cgroup/pod/memory.pressure", f"some avg10=0.00 total={waited_us}\nfull avg10=0.00 total=0")

    def count_limits(self, high: int) -> None:
        self._write("sys/fs/cgroup/pod/memory.events", f"low 0\nhigh {high}\nmax 0\noom 0\noom_kill 0")

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def test_plenty_is_not_short_and_is_looked_at_seldom(tmp_path: Path) -> None:
    found = Machine(tmp_path).watch.look(GIB)
    assert (found.reason, found.missing_bytes, found.wait_s) == ("", 0, FAR_WAIT_S)
    assert found.free_bytes == 60 * GIB
    assert found.spare_bytes == 4 * GIB


def test_a_machine_with_less_than_a_64th_free_is_short_until_a_16th_is_free(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set_available(1 * GIB)
    assert machine.watch.look(GIB).reason == ""
    machine.set_available(1 * GIB - MIB)
    machine.now_s += 1e6
    found = machine.watch.look(GIB)
    assert found.reason == "machine"
    assert "MemAvailable" in found.limited_by
    assert 3 * GIB <= found.missing_bytes <= 3 * GIB + 2 * MIB
    assert found.wait_s == NEAR_WAIT_S


def test_the_limits_of_a_cgroup_count_high_as_well_as_max(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.limit(used=8 * GIB - 100 * MIB, most=8 * GIB)
    found = machine.watch.look(GIB)
    assert (found.reason, found.missing_bytes) == ("cgroup", 412 * MIB)
    assert "memory.max" in found.limited_by
    machine.limit(used=3 * GIB, most=8 * GIB, high=3 * GIB + MIB)
    found = machine.watch.look(GIB)
    assert found.reason == "cgroup"
    assert "memory.high" in found.limited_by


def test_memory_that_others_take_fast_is_given_back_before_it_is_short(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.limit(used=4 * GIB, most=8 * GIB)
    assert machine.watch.look(GIB).reason == ""
    machine.now_s += 1.0
    machine.limit(used=6 * GIB, most=8 * GIB)
    assert machine.watch.look(GIB).reason == ""  # 1 GiB more in half a second leaves another one
    machine.now_s += 0.1
    machine.limit(used=6 * GIB + 400 * MIB, most=8 * GIB)
    assert machine.watch.look(GIB).reason == "cgroup"


def test_what_the_pool_takes_itself_is_not_what_others_take(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.limit(used=4 * GIB, most=8 * GIB)
    machine.watch.look(GIB)
    machine.now_s += 0.1
    machine.limit(used=6 * GIB, most=8 * GIB)
    assert machine.watch.look(3 * GIB).reason == ""


def test_processes_that_wait_for_memory_show_a_shortage_where_little_is_free(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.limit(used=8 * GIB - 400 * MIB, most=8 * GIB)
    machine.press(0)
    assert machine.watch.look(GIB).reason == ""
    machine.now_s += 2.0
    machine.press(150_000)
    assert machine.watch.look(GIB).reason == ""  # 7.5% of the time
    machine.now_s += 2.0
    machine.press(150_000 + 250_000)
    found = machine.watch.look(GIB)
    assert (found.reason, found.missing_bytes) == ("stalls", 112 * MIB)
    # The same where much is free is other people's reclaim of files.
    machine.limit(used=4 * GIB, most=8 * GIB)
    assert machine.watch.look(GIB).reason == ""


def test_a_limit_that_was_reached_shows_a_shortage_for_a_second(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.limit(used=8 * GIB - 400 * MIB, most=10 * GIB, high=8 * GIB)
    machine.count_limits(5)
    assert machine.watch.look(GIB).reason == ""
    machine.now_s += 1.0
    machine.count_limits(9)
    assert machine.watch.look(GIB).reason == "stalls"
    machine.now_s += 1.0
    assert machine.watch.look(GIB).reason == ""


def test_without_the_kernels_files_nothing_is_short(tmp_path: Path) -> None:
    found = MemoryWatch(lambda: 1.0, root=tmp_path).look(GIB)
    assert (found.reason, found.missing_bytes) == ("", 0)
