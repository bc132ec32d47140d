"""Engines that give hints to a server."""

from __future__ import annotations

from typing import Any

from kvoffload.protocol import Hint, HintAction, Hinted, Inspect, ServerMessage
from kvoffload.protocol.hints import ListRetained, RetainedPrefix
from tests.kit.server.harness import Client, Server, core_settings

SECOND_NS = 1_000_000_000
SETTINGS = core_settings(operator_uids=frozenset({0}), operator_token="secret")


def try_hint(client: Client, action: HintAction, chain: bytes = b"", **said: Any) -> ServerMessage:
    """The answer to a hint, with the turns of the loop that it takes. Of the client's own blocks, unless it is said."""
    server = client.server
    answer = client.ask(Hint(**({"name_space": client.name_space, "action": action, "chain": chain} | said)))
    for _ in range(20):
        if answer is not None:
            break
        server.now_ns += 1_000_000
        answer = server.deliver(server.core.advance(server.now_ns), key=client.key)
    assert isinstance(answer, ServerMessage)
    return answer


def hint(client: Client, action: HintAction, chain: bytes = b"", **said: Any) -> Hinted:
    answer = try_hint(client, action, chain, **said)
    assert isinstance(answer, Hinted), answer
    return answer


def list_retained(operator: Client) -> list[RetainedPrefix]:
    """Lists the retained prefixes. The one that gives way first comes first."""
    told = operator.ask(ListRetained())
    assert told.total == len(told.prefixes)
    return list(told.prefixes)


def pass_time(client: Client, seconds: float) -> None:
    """A turn of the loop so much later."""
    server = client.server
    server.now_ns += int(seconds * SECOND_NS)
    assert server.deliver(server.core.advance(server.now_ns)) is None


def watch(server: Server) -> Client:
    """An operator."""
    return server.process("inspect", uid=0).watch()


def counts(operator: Client) -> tuple[dict[str, int], dict[str, int]]:
    """Hints by action and outcome, and their tokens by outcome."""
    told = operator.ask(Inspect())
    return {one.name: one.count for one in told.hints}, {one.name: one.count for one in told.hint_tokens}
