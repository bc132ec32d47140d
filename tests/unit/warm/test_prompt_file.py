"""Prompts of a file, and what is none."""

from __future__ import annotations

import io
import json

import pytest

from kvoffload.warm import prompt_file
from kvoffload.warm.prompt_file import BadLine, WarmPrompt, read_prompts


def read(*lines: object) -> list[WarmPrompt | BadLine]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return list(read_prompts(io.BytesIO(text.encode())))


def test_a_prompt_is_text_tokens_or_messages() -> None:
    talk = [{"role": "user", "content": "hello"}]
    text, tokens, chat = read({"prompt": "hello"}, "", {"prompt": [1, 2]}, {"messages": talk, "model": "m"})
    assert isinstance(text, WarmPrompt)
    assert isinstance(tokens, WarmPrompt)
    assert isinstance(chat, WarmPrompt)
    assert [one.line for one in (text, tokens, chat)] == [1, 3, 4]
    assert [one.path for one in (text, tokens, chat)] == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
    assert [one.tokens for one in (text, tokens, chat)] == [None, [1, 2], None]
    assert chat.body == {"messages": talk, "model": "m", "max_tokens": 1}


def test_what_asks_for_more_than_one_token_is_left_out_and_the_rest_goes_along() -> None:
    line = {"prompt": "a", "max_tokens": 500, "n": 4, "stream": True, "temperature": 0, "cache_salt": "s", "pin_s": 60}
    [prompt] = read({**line, "kv_transfer_params": {"tenant": "t"}})
    assert isinstance(prompt, WarmPrompt)
    params = {"tenant": "t", "pin_s": 60}
    wanted = {"prompt": "a", "max_tokens": 1, "temperature": 0, "cache_salt": "s", "kv_transfer_params": params}
    assert prompt.body == wanted


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "levels"),
        ([1], "either `prompt` or `messages`"),
        ({"prompt": "a", "messages": []}, "either `prompt` or `messages`"),
        ({"text": "a"}, "either `prompt` or `messages`"),
        ({"messages": "a"}, "no list"),
        ({"prompt": ["a", "b"]}, "neither text nor a list of tokens"),
        ({"prompt": []}, "neither text nor a list of tokens"),
        ({"prompt": [1, True]}, "neither text nor a list of tokens"),
    ],
)
def test_a_line_that_is_none_is_told_and_the_next_is_read(line: object, why: str) -> None:
    bad, good = read(line, {"prompt": "a"})
    assert isinstance(bad, BadLine)
    assert (bad.line, why in bad.why) == (1, True)
    assert isinstance(good, WarmPrompt)


def test_bytes_that_are_no_text_are_told() -> None:
    [bad] = read_prompts(io.BytesIO(b'{"prompt": "\xff"}\n'))
    assert isinstance(bad, BadLine)


def test_no_line_is_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_file, "MAX_LINE_BYTES", 1 << 20)
    long = {"prompt": "a" * (1 << 20)}
    good, bad = read({"prompt": "a"}, long, {"prompt": "b"})
    assert isinstance(good, WarmPrompt)
    assert bad == BadLine(line=2, why="has more than 1 MiB; the lines after it were not read")
