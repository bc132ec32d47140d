"""A real vLLM engine in a process of its own, in the environment that has vLLM: a line of JSON each way.

python -m tests.sglang.vllm_process MODEL SERVER PAGE
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.sglang.engine_process import say


def main() -> None:
    from tests.vllm import connector_probe as probe
    from tests.vllm.engine import prepare_environment, start_engine
    from tests.vllm.tiny_models import DENSE

    prepare_environment()
    model, server, page = sys.argv[1:]
    engine = start_engine(
        replace(DENSE, engine_args={}),
        Path(model),
        kv_transfer_config=probe.transfer(server=server),
        block_size=int(page),
        max_model_len=2048,
    )
    probe.prepare(engine)
    say({"started": True})
    for line in sys.stdin:
        say(serve(engine, json.loads(line)))


def serve(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    from tests.vllm.equality import read_answer

    if command["do"] == "flush":
        engine.reset_local()
        return {"flushed": True}
    answer = read_answer(
        engine.generate(command["prompt"], max_tokens=command["new_tokens"], logprobs=3),
        max_tokens=command["new_tokens"],
    )
    engine.drain()
    return {"tokens": answer.tokens, "logprobs": answer.logprobs, "cached": answer.cached}


if __name__ == "__main__":
    main()
