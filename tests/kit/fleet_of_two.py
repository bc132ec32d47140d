"""Two cache servers on two machines that know each other by their keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvoffload.key_files import write_new_pair
from tests.kit.machines import Network
from tests.vllm.cache_server import SharedServer

CONTROL_PORT, LINK_PORT = 5555, 7600


@contextmanager
def fleet_of_two(folder: Path, network: Network, **settings: str) -> Iterator[tuple[SharedServer, SharedServer]]:
    """Runs two servers. The same file lies on both machines."""
    machines = (network.one, network.other)
    tables = ""
    for machine in machines:
        public = write_new_pair(folder / machine.name)[1]
        key = public.read_text().split()[-1]
        tables += f'[[peers]]\naddress = "tcp://{machine.address}:{CONTROL_PORT}"\nkey = "{key}"\n'
    with ExitStack() as stack:
        servers = []
        for machine in machines:
            room = folder / f"room-{machine.name}"
            room.mkdir()
            server = SharedServer(
                room,
                tables=tables,
                enter=machine.enter,
                listen=f"tcp://{machine.address}:{CONTROL_PORT}",
                peer_listen=f"tcp://{machine.address}:{LINK_PORT}",
                key_file=str(folder / f"{machine.name}.key"),
                **settings,
            )
            servers.append(stack.enter_context(server))
        for server in servers:
            server.start()
        yield servers[0], servers[1]
