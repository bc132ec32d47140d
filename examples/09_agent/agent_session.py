"""An agent's session over an OpenAI-compatible client: what it has so far stays in the cache between its turns.

    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-")
    with AgentSession(client, "Qwen/Qwen3-8B", ttl_s=300, web="http://127.0.0.1:9470", token=token) as session:
        answer = session.turn("What does the log say?")
        answer = session.turn(run_tool(answer))
        print(session.report())

`web` is the address of `kvoffload web`, for `report` and `release`; without it they do nothing, and the session ends
with its time to live.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
import urllib.request
import uuid
from typing import Any

ASK_S = 5.0


class AgentSession:
    """One agent's, on one thread. `client` is an `openai.OpenAI`, or has `chat.completions.create` as that one has."""

    def __init__(
        self, client: Any, model: str, *, ttl_s: float = 300.0, name: str = "", web: str = "", token: str = ""
    ) -> None:
        self.name = name or f"agent-{uuid.uuid4().hex}"
        self.messages: list[dict[str, Any]] = []
        self._client, self._model, self._ttl_s, self._web, self._token = client, model, ttl_s, web.rstrip("/"), token

    def turn(self, content: str, *, role: str = "user", is_last: bool = False, **more: Any) -> str:
        """Sends a message and returns the answer. The conversation's cache is kept until the turn after this one, for
        `ttl_s` at most, and let go after the last turn. `more` goes to the client."""
        self.messages.append({"role": role, "content": content})
        params: dict[str, Any] = {"session": self.name, "session_ttl_s": self._ttl_s}
        if is_last:
            params["kv_hints"] = self._make_release()
        completion = self._client.chat.completions.create(
            model=self._model, messages=list(self.messages), extra_body={"kv_transfer_params": params}, **more
        )
        answer = completion.choices[0].message.content or ""
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def release(self) -> None:
        """Lets go of the kept cache: the conversation has ended."""
        if self._web:
            self._ask("/v1/hints", self._make_release())

    def report(self) -> dict[str, Any]:
        """Returns the turns, the tokens that were asked of the cache and hit, and the seconds that saved."""
        found = self._ask(f"/v1/sessions?session={urllib.parse.quote(self.name)}")["sessions"] if self._web else []
        return next(iter(found), {})

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *_: object) -> None:
        # An exception from the block must stay visible. Kept cache ends with its time to live anyway.
        with contextlib.suppress(OSError):
            self.release()

    def _make_release(self) -> dict[str, Any]:
        payload = {"session": self.name}
        action = {"action_id": "1", "action_type": "release", "action_version": "1", "payload": payload}
        return {"protocol_version": "1", "message_id": self.name, "actions": [action]}

    def _ask(self, path: str, body: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._web + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            return json.loads(answer.read())
