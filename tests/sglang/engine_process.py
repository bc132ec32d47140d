"""The real engine in a process of its own, which a test tells what to do: a line of JSON each way.

python -m tests.sglang.engine_process ARGUMENTS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
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
    if command["do"] == "update_parameter":
        return {"updated": update_parameter(engine, command["folder"], command["name"], flushes=command["flushes"])}
    if command["do"] == "abort":
        return {"finish": engine.loop.run_until_complete(abort(engine, command["prompts"], command["after_s"]))}
    sampling = {"temperature": 0, "max_new_tokens": command["new_tokens"], "ignore_eos": True}
    extra = {} if command["salt"] is None else {"cache_salt": command["salt"]}
    if command.get("adapter"):
        extra["lora_path"] = [command["adapter"]] * len(command["prompts"])
    begun_s = time.perf_counter()
    one_or_more = engine.generate(input_ids=command["prompts"], sampling_params=sampling, return_logprob=True, **extra)
    seconds = time.perf_counter() - begun_s
    return {"answers": [read_answer(one) for one in one_or_more], "seconds": seconds}


def update_parameter(engine: Any, folder: str, name: str, *, flushes: bool) -> bool:
    """As trainers do: the tensor itself is sent, in a session."""
    from safetensors.torch import load_file

    tensor = load_file(Path(folder) / "model.safetensors")[name]
    answers = [
        engine.begin_weight_update(),
        engine.update_weights_from_tensor([(name, tensor)], flush_cache=flushes),
        engine.end_weight_update(),
    ]
    return all(answer[0] for answer in answers)


async def abort(engine: Any, prompts: list[list[int]], after_s: float) -> list[str]:
    """Sends all at once, and takes all back when the time has come. Returns how each has ended."""

    async def ask(prompt: list[int]) -> str:
        sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        stream = await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
        reasons = [part["meta_info"]["finish_reason"] async for part in stream]
        return str(reasons[-1]["type"])

    requests = [asyncio.ensure_future(ask(prompt)) for prompt in prompts]
    await asyncio.sleep(after_s)
    engine.tokenizer_manager.abort_request(abort_all=True)
    return list(await asyncio.gather(*requests))


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
