"""The part that `run.py` runs in the environment with SGLang: one prompt, cold, by SGLang's own hit, and restored."""

from __future__ import annotations

import json
import sys
from typing import Any

from prompt import NEW_TOKENS, PAGE, PROMPT, await_flush, tell


def main(model: str, server: str, arguments: str) -> None:
    from sglang import Engine

    engine = Engine(
        model_path=model,
        page_size=PAGE,
        device="cpu",
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "KVOffloadLinker",
            "linker_module_path": "kvoffload.sglang.plugin",
            # As long as this example may have to wait on a busy machine.
            "linker_extra_config": {"server": server, "acquire_deadline": "5s", "step_budget": "1s"},
        },
        **json.loads(arguments),
    )

    def ask() -> Any:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        return engine.generate(input_ids=PROMPT, sampling_params=sampling)

    first, own = ask(), ask()
    # It is emptied when all that was offered is saved.
    await_flush(lambda: bool(engine.flush_cache().success))
    again = ask()
    # Tokens that the device had itself are not counted.
    restored = (again["meta_info"].get("cached_tokens_details") or {}).get("host", 0)
    tell(
        "SGLang",
        first=first["meta_info"]["cached_tokens"],
        again=restored,
        is_equal=again["output_ids"] == own["output_ids"],
    )
    engine.shutdown()


if __name__ == "__main__":
    # SGLang starts processes that import this file.
    main(*sys.argv[1:])
