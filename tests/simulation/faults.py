"""Faults that may happen to a machine at any moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.process import Process
from tests.simulation.server_machine import Server

if TYPE_CHECKING:
    from tests.simulation.world import World


def inject_fault(world: World, who: Process | Server) -> None:
    """Injects a fault into the process or server that is about to receive a message, or into another one."""
    random = world.timeline.random
    if isinstance(who, Server) or not random.randrange(4):
        act = random.choices(_SERVER_FAULTS, _SERVER_WEIGHTS)[0]
        if world.machine.listener is not None:
            act(world, world.machine.listener)
        return
    process = who if random.randrange(4) else random.choice(world.living)
    random.choices(_PROCESS_FAULTS, _PROCESS_WEIGHTS)[0](world, process)


def _kill(world: World, server: Server) -> None:
    server.kill()
    if world.timeline.chance(0.6):
        world.timeline.after(world.timeline.between_ms(0.1, 400), world.machine.start)


def _stop(world: World, server: Server) -> None:
    server.stop()
    end = _end_server if world.timeline.chance(0.2) else Server.go_on
    end_ns = world.timeline.between_ms(1, 2500)
    world.timeline.after(end_ns, lambda: end(server))


def _end_server(server: Server) -> None:
    if server.world.is_busy:
        server.kill()


def _drain(world: World, server: Server) -> None:
    """Drains a server as an orchestrator does it: a request, and some time later no request any more."""
    server.drain()
    world.timeline.after(world.timeline.between_ms(50, 2500), _end_server, server)


def _crash(world: World, process: Process) -> None:
    process.crash()
    for engine in world.engines:
        if process in engine.processes:
            world.timeline.after(world.timeline.between_ms(1, 500), engine.replace, process)


def _crash_engine(world: World, process: Process) -> None:
    for engine in world.engines:
        if process in engine.processes:
            engine.crash()


def _stop_process(world: World, process: Process) -> None:
    process.stop()
    world.timeline.after(world.timeline.between_ms(1, 1500), process.go_on)


def _lag(world: World, process: Process) -> None:
    process.lag(world.timeline.now_ns + world.timeline.between_ms(5, 3000))


def _cut_lifeline(world: World, process: Process) -> None:
    connection = process.wire.lifeline
    if connection is not None:
        process.note("its lifeline is CUT")
        connection.break_off()


def _cut_control(world: World, process: Process) -> None:
    connection = process.wire.control
    if connection is not None:
        process.note("its control connection is CUT")
        connection.break_off()


def _cut_express(world: World, process: Process) -> None:
    connection = process.wire.express
    if connection is not None:
        process.note("its express channel is CUT")
        connection.break_off()


_SERVER_FAULTS: list[Callable[[World, Server], None]] = [_kill, _stop, _drain]
_SERVER_WEIGHTS = [4, 3, 1]
_PROCESS_FAULTS: list[Callable[[World, Process], None]] = [
    _crash,
    _crash_engine,
    _stop_process,
    _lag,
    _cut_lifeline,
    _cut_control,
    _cut_express,
]
_PROCESS_WEIGHTS = [2, 2, 3, 3, 3, 2, 2]
