"""`kvoffload web`: a cache server's numbers over HTTP, in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import typer

from kvoffload.cli.config import ConfigOption, SetOption, parse_assignments
from kvoffload.config.sources import LoadedSettings, load_shared
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_private_text

MIN_TOKEN_LETTERS = 16
NICENESS = 10


def web(file: ConfigOption = None, assignments: SetOption = None) -> None:
    """Answer HTTP for the cache server of these settings, until SIGTERM; it may come and go meanwhile."""
    loaded = load_shared(file, parse_assignments(assignments or []))
    level = loaded.settings.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Where processors are short, engines and their server go first.
    os.nice(NICENESS)
    asyncio.run(serve_http(loaded, read_token(loaded.settings.http_token_file)))


def read_token(file: str) -> str:
    """Reads the token. Empty: there is none. ConfigError: the file cannot be read, or its token is too short or not
    printable."""
    if not file:
        return ""
    token = read_private_text(Path(file)).strip()
    if len(token) < MIN_TOKEN_LETTERS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"token file {file} holds no token",
            remedy=f"write at least {MIN_TOKEN_LETTERS} printable letters, as `openssl rand -hex 16` does",
        )
    return token


async def serve_http(loaded: LoadedSettings, token: str) -> None:
    from kvoffload.client import Client
    from kvoffload.client.joining import Member
    from kvoffload.client.settings import ClientSettings
    from kvoffload.config.tcp_address import parse_tcp_address
    from kvoffload.protocol import Role
    from kvoffload.web.application import Application
    from kvoffload.web.hints import Hints
    from kvoffload.web.http_server import HttpServer, HttpSettings
    from kvoffload.web.prefixes import Prefixes
    from kvoffload.web.server_calls import ServerCalls
    from kvoffload.web.watcher import Watcher

    settings = loaded.settings
    member = Member(engine="web", role=Role.OBSERVER)
    with Client(ClientSettings(socket=Path(settings.server), member=member)) as client:
        calls = ServerCalls(client)
        application = Application(Watcher(calls), Prefixes(calls, token), Hints(calls, token), loaded, token=token)
        router = application.router
        http_settings = HttpSettings(address=parse_tcp_address(settings.http))
        server = HttpServer(http_settings, router.answer, find_body_limit=router.find_body_limit)
        await server.start()
        over = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        typer.echo(f"kvoffload tells of {settings.server} at {str(server.address).replace('tcp', 'http', 1)}")
        keeping = asyncio.get_running_loop().create_task(application.keep_history())
        await over.wait()
        keeping.cancel()
        await server.close()
