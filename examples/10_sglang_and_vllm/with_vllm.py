"""The part that `run.py` runs in the environment with vLLM: one prompt, cold, by vLLM's own hit, and restored."""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from prompt import NEW_TOKENS, PAGE, PROMPT, await_flush, tell
from vllm import LLM, RequestOutput, SamplingParams


def main(model: str, server: str, arguments: str) -> None:
    connector = {
        "kv_connector": "KVOffloadConnector",
        "kv_role": "kv_both",
        # As long as this example may have to wait on a busy machine.
        "kv_connector_extra_config": {"server": server, "load_policy": "always", "acquire_deadline": "5s"},
    }
    llm = LLM(model, block_size=PAGE, kv_transfer_config=connector, **json.loads(arguments))
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def ask() -> RequestOutput:
        return llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)[0]

    first, own = ask(), ask()
    core = llm.llm_engine.engine_core.engine_core

    def flush() -> bool:
        if core.scheduler.has_requests():
            # Saves go with the steps of the engine, and it steps for requests alone.
            llm.llm_engine.step()
            return False
        return llm.reset_prefix_cache()

    await_flush(flush)
    again = ask()
    is_equal = again.outputs[0].token_ids == own.outputs[0].token_ids
    tell("vLLM", first=first.num_cached_tokens or 0, again=again.num_cached_tokens or 0, is_equal=is_equal)


if __name__ == "__main__":
    main(*sys.argv[1:])
