"""The page may stop waiting for the answer to a question, and its loop may end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from kvoffload.client import LinkState
from kvoffload.protocol.message import Reply
from kvoffload.protocol.survey import IdentityRead, ReadIdentity
from tests.kit.children import child, stop
from tests.kit.client.served import wait_for
from tests.kit.web.asked import calls_to
from tests.unit.client.conftest import SERVER


def test_a_question_that_is_given_up_is_forgotten_and_its_loop_is_told_nothing(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = []
    with child(["-c", SERVER, str(tmp_path / "s"), "0"], says="serves") as server, calls_to(tmp_path / "s") as calls:

        async def give_up() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
            question = asyncio.ensure_future(calls.look_into(ReadIdentity(place=0)))
            await asyncio.sleep(0)
            question.cancel()
            with pytest.raises(asyncio.CancelledError):
                await question

        async def give_up_and_ask_again() -> Reply:
            await give_up()
            server.send_signal(signal.SIGCONT)
            return await calls.look_into(ReadIdentity(place=0))

        stop(server)
        asyncio.run(give_up())
        assert calls.client.link.lanes.awaits_control
        server.send_signal(signal.SIGCONT)
        wait_for(lambda: not calls.client.link.lanes.awaits_control)
        stop(server)
        assert isinstance(asyncio.run(give_up_and_ask_again()), IdentityRead)
        client = calls.client
    assert client.link.state is LinkState.CLOSED
    assert not faults
