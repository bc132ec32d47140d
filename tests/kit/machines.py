"""Machines of a test: network namespaces with one wire between them, whose delay, loss and end the test decides.

The wire is a thread that carries packets from one machine's device to the other's.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 65_000
_PACKETS_ON_THE_WAY = 4096
"""Beyond it they are lost, as in any router."""
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Machine:
    """One namespace. `enter` begins a command that runs in it."""

    name: str
    address: str
    device: str

    @property
    def enter(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


class Wire:
    """Lies between two devices. `delay_s` of each packet, `loss` as a share of them, 1 for all."""

    def __init__(self, one: int, other: int) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self._to = {one: other, other: one}
        self._random = random.Random(1)
        self._wake, self._end = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def close(self) -> None:
        os.close(self._end)
        self._thread.join()
        for file in (self._wake, *self._to):
            os.close(file)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        for number in itertools.count():
            wait_s = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
            ready, _, _ = select.select([self._wake, *self._to], [], [], wait_s)
            if self._wake in ready:
                return
            now_s = time.monotonic()
            for file in ready:
                packet = os.read(file, 1 << 16)
                if self._random.random() >= self.loss and len(waiting) < _PACKETS_ON_THE_WAY:
                    heapq.heappush(waiting, (now_s + self.delay_s, number, self._to[file], packet))
            while waiting and waiting[0][0] <= now_s:
                _, _, file, packet = heapq.heappop(waiting)
                os.write(file, packet)


@dataclass(frozen=True)
class Network:
    """Two machines, which reach each other and no other machine."""

    one: Machine
    other: Machine
    wire: Wire


def why_not() -> str:
    """Names the thing that is missing to have machines here; empty: nothing is missing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip (Debian's iproute2) is not installed"
    if not os.path.exists(_TUN):
        return f"no {_TUN}"
    try:
        with two_machines():
            return ""
    except (AssertionError, OSError) as fault:
        return f"no network namespaces here: {fault}"


@contextmanager
def two_machines() -> Iterator[Network]:
    """Gone with all that is theirs when it is left; what runs in them is its starter's."""
    mark = f"kvo{os.getpid()}x{next(_NUMBERS)}"
    one, other = (Machine(f"{mark}{side}", f"10.77.0.{at}", f"{mark}{side}") for at, side in ((1, "a"), (2, "b")))
    made, files = [], []
    wire: Wire | None = None
    try:
        for machine in (one, other):
            run("ip", "netns", "add", machine.name)
            made.append(machine)
            files.append(_make_device(machine))
        wire = Wire(files[0], files[1])
        yield Network(one, other, wire)
    finally:
        # The devices first: without their machines they are of no use to the wire.
        if wire is not None:
            wire.close()
        else:
            for file in files:
                os.close(file)
        for machine in made:
            run("ip", "netns", "del", machine.name)


@contextmanager
def inside(machine: Machine) -> Iterator[None]:
    """This thread is in the machine, and so is every process that it starts meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(file: int) -> None:
        if libc.setns(file, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")

    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(Path("/", "run", "netns", machine.name), os.O_RDONLY | os.O_CLOEXEC)  # where ip keeps them
    try:
        enter(there)
        try:
            yield
        finally:
            enter(here)
    finally:
        os.close(here)
        os.close(there)


def _make_device(machine: Machine) -> int:
    """Makes a device and moves it into the machine. The returned file is the device's other end."""
    file = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH14x", machine.device.encode(), _IFF_TUN | _IFF_NO_PI))
    run("ip", "link", "set", machine.device, "netns", machine.name)
    run("ip", "-n", machine.name, "address", "add", f"{machine.address}/24", "dev", machine.device)
    run("ip", "-n", machine.name, "link", "set", machine.device, "mtu", str(_PACKET_BYTES), "up")
    run("ip", "-n", machine.name, "link", "set", "lo", "up")
    return file


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
