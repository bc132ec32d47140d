"""Requests over HTTP, their repetitions, and the handling of faults."""

from __future__ import annotations

import pytest

from kvoffload.errors import ConfigError
from kvoffload.warm import json_client
from kvoffload.warm.json_client import AnswerError, JsonClient
from tests.kit.free_ports import free_port
from tests.kit.warm.played_engine import MODEL, PlayedEngine, played_engine

PATH = "/v1/completions"


def test_an_answer_is_what_json_says_and_the_key_goes_along() -> None:
    with played_engine(PlayedEngine()) as engine:
        client = JsonClient(engine.address + "/", key="secret")
        assert client.get("/v1/models")["data"][0]["id"] == MODEL
        assert client.post(PATH, {"prompt": "ab"}) == {"usage": {"prompt_tokens": 64}}
        assert engine.keys == {"Bearer secret"}


def test_who_is_busy_is_asked_again_and_not_for_ever() -> None:
    waits: list[float] = []
    with played_engine(PlayedEngine(faults=[503, 429])) as engine:
        client = JsonClient(engine.address, wait=waits.append)
        assert client.post(PATH, {"prompt": "a"})["usage"]
        engine.faults = [503] * 9
        with pytest.raises(AnswerError, match=r"answers 503: .*fault 503"):
            client.post(PATH, {"prompt": "a"})
        assert len(engine.asked) == 6
    assert waits == [1.0, 2.0, 1.0, 2.0]


def test_who_refuses_is_asked_once() -> None:
    with played_engine(PlayedEngine(faults=[400, 500])) as engine:
        for status in (400, 500):
            with pytest.raises(AnswerError, match=f"answers {status}"):
                JsonClient(engine.address).post(PATH, {"prompt": "a"})
        assert len(engine.asked) == 2


def test_who_is_away_is_asked_again() -> None:
    waits: list[float] = []
    with pytest.raises(AnswerError, match=r"127\.0\.0\.1 does not answer /x"):
        JsonClient(f"http://127.0.0.1:{free_port()}", wait=waits.append).get("/x")
    assert len(waits) == json_client.ATTEMPTS - 1


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_client, "MAX_ANSWER_BYTES", 8)
    with played_engine(PlayedEngine()) as engine, pytest.raises(AnswerError, match="does not answer"):
        JsonClient(engine.address, wait=lambda seconds: None).get("/v1/models")


def test_an_answer_that_takes_too_long_is_none() -> None:
    """Each of its pieces may come in time."""
    times = iter((0.0, 31.0))
    with played_engine(PlayedEngine()) as engine:
        client = JsonClient(engine.address, timeout_s=30.0, clock=lambda: next(times))
        with pytest.raises(AnswerError, match="does not answer /v1/models: timed out"):
            client.exchange("GET", "/v1/models", None)


def test_an_exchange_is_of_one_attempt_and_of_any_form() -> None:
    with played_engine(PlayedEngine(faults=[503])) as engine:
        status, data = JsonClient(engine.address).exchange("POST", PATH, b'{"prompt": "a"}')
        assert (status, b"fault 503" in data, len(engine.asked)) == (503, True, 1)
    with pytest.raises(AnswerError, match="does not answer"):
        JsonClient(f"http://127.0.0.1:{free_port()}").exchange("GET", "/x", None)


@pytest.mark.parametrize("key", ["secret\nsecret", "secret\r", "sécret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(ConfigError, match="not one line of printable ASCII") as raised:
        JsonClient("http://127.0.0.1:1", key=key)
    assert "cret" not in f"{raised.value} {raised.value.remedy}"


_BAD_PORTS = ["http://a:b", "http://a:99999"]
_BAD_HOSTS = ["http://[::1", "http://[a]", f"http://{'a' * 64}", "http://a..b"]
_BAD_PATHS = ["http://a/b c", "http://a/ä", "http://a?b"]


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://u@a", *_BAD_PORTS, *_BAD_HOSTS, *_BAD_PATHS]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        JsonClient(address)
