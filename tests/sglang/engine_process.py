"""The real engine in a process of its own, which a test tells what to do: a line of JSON each way.

python -m tests.sglang.engine_process ARGUMENTS
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

REPLY = "reply "
"""Begins a line that is for the test; others are the engine's."""


def main() -> None:
    from sglang import Engine

    engine = Engine(**json.loads(sys.argv[1]))
    say({"pid": os.getpid()})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            say(serve(engine, command))
        except Exception as fault:  # noqa: BLE001  (whatever the engine raises is the test's to judge)
            say({"error": f"{type(fault).__name__}: {fault}"})
    engine.shutdown()


def serve(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "flush":
        answer = engine.flush_cache()
        return {"flushed": bool(getattr(answer, "success", answer))}
    if command["do"] == "update_weights":
        answer = engine.update_weights_from_disk(command["folder"])
        return {"updated": bool(answer[0])}
    sampling = {"temperature": 0, "max_new_tokens": command["new_tokens"], "ignore_eos": True}
    extra = {} if command["salt"] is None else {"cache_salt": command["salt"]}
    if command.get("adapter"):
        extra["lora_path"] = [command["adapter"]] * len(command["prompts"])
    one_or_more = engine.generate(input_ids=command["prompts"], sampling_params=sampling, return_logprob=True, **extra)
    return {"answers": [read_answer(one) for one in one_or_more]}


def read_answer(answer: dict[str, Any]) -> dict[str, Any]:
    told = answer["meta_info"]
    return {
        "tokens": answer["output_ids"],
        "logprobs": [row[0] for row in told["output_token_logprobs"]],
        "cached": told["cached_tokens"],
        "details": told.get("cached_tokens_details"),
        "finish": told["finish_reason"],
    }


def say(reply: dict[str, Any]) -> None:
    print(REPLY + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
