"""The session handle of examples, 09_agent/agent_session.py, with a client that is played and a real cache server."""

from __future__ import annotations

import runpy
import types
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.web import MIN_TOKEN_LETTERS
from kvoffload.client import HintSettings
from kvoffload.protocol import HintAction
from kvoffload.protocol.hints import ListRetained, Retained
from tests.examples.serve import EXAMPLES
from tests.house.commands import BLOCKS
from tests.kit.cache.cache_model import make_chain
from tests.kit.cli.web_process import get, web
from tests.kit.free_ports import free_port
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.prompt_load import PromptLoad

AgentSession = runpy.run_path(str(EXAMPLES / "09_agent/agent_session.py"))["AgentSession"]
TOKEN = "x" * MIN_TOKEN_LETTERS


class PlayedClient:
    """Answers with the number of messages, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.chat = types.SimpleNamespace(completions=self)

    def create(self, **asked: Any) -> Any:
        self.asked.append(asked)
        message = types.SimpleNamespace(content=str(len(asked["messages"])))
        return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)])

    @property
    def settings(self) -> list[dict[str, Any]]:
        return [asked["extra_body"]["kv_transfer_params"] for asked in self.asked]


def test_turns_grow_and_name_their_session_and_the_last_lets_it_go() -> None:
    client = PlayedClient()
    with AgentSession(client, "m", ttl_s=60) as session:
        assert [session.turn("one"), session.turn("two", role="tool", temperature=0)] == ["1", "3"]
        assert session.turn("end", is_last=True) == "5"
        assert session.report() == {}
    assert [one["content"] for one in client.asked[-1]["messages"]] == ["one", "1", "two", "3", "end"]
    assert client.asked[1]["temperature"] == 0
    assert {(settings["session"], settings["session_ttl_s"]) for settings in client.settings} == {(session.name, 60)}
    (action,) = client.settings[-1]["kv_hints"]["actions"]
    assert (action["action_type"], action["payload"]) == ("release", {"session": session.name})
    assert "kv_hints" not in client.settings[0]


def test_what_went_wrong_in_a_session_is_seen_though_nobody_can_be_told_to_let_go() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ZeroDivisionError), AgentSession(PlayedClient(), "m", web=address):
        raise ZeroDivisionError
    with pytest.raises(OSError, match="refused"):
        AgentSession(PlayedClient(), "m", web=address).release()


def test_sessions_have_names_of_their_own() -> None:
    names = {AgentSession(PlayedClient(), "m").name for _ in range(2)}
    assert len(names) == 2
    assert all(len(name) <= 64 for name in names)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return file


def retained(load: PromptLoad) -> list[str]:
    told = load.client.look_into(ListRetained())
    assert isinstance(told, Retained)
    return [one.session for one in told.prefixes]


def test_the_report_is_the_servers(tmp_path: Path, token: Path) -> None:
    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        load = PromptLoad(tmp_path / "s")
        with web(tmp_path / "s", f"http_token_file={token}") as address:
            await_that(lambda: get(f"{address}/readyz")[0] == 200)
            session = AgentSession(PlayedClient(), "m", web=address, token=TOKEN)
            assert session.report() == {}
            for _ in range(2):
                load.turn(conversations=1, session=session.name)
                load.client.stats()  # what was stored is there
            load.await_told()
            report = session.report()
            assert (report["session"], report["turns"]) == (session.name, 2)
            assert 0 < report["hit_tokens"] < report["asked_tokens"]
            answers: list[object] = []
            hint = HintSettings(action=HintAction.RETAIN, chain=make_chain(0, 4), session=session.name, ttl_s=60)
            load.client.start_hint(hint, on_answer=answers.append)
            await_that(lambda: bool(answers))
            assert retained(load) == [session.name]
            session.release()
            assert retained(load) == []
        load.close()


def test_the_program_of_the_page_runs(tmp_path: Path, token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in BLOCKS if block.language == "python" and "AgentSession" in block.text]
    client = PlayedClient()
    names = {"AgentSession": AgentSession, "client": client, "TOKEN": TOKEN, "run_tool": str.upper}
    with serving(tmp_path / "s") as server, web(tmp_path / "s", f"http_token_file={token}") as address:
        await_that(lambda: server.has_memory and get(f"{address}/readyz")[0] == 200)
        program = tmp_path / "page.py"
        program.write_text(block.text.replace("http://127.0.0.1:9470", address))
        runpy.run_path(str(program), init_globals=names)
    assert capsys.readouterr().out == "{}\n"
    assert [len(asked["messages"]) for asked in client.asked] == [1, 3]
