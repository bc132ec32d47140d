"""The other machine of an engine with ranks on two: what `vllm serve --headless` runs there.

Called with the engine's arguments as JSON, at the head of a process group. Ends with all that are in it when its
standard input does: vLLM's workers go on when the one that started them is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading


def end_with_input() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    threading.Thread(target=end_with_input, daemon=True).start()
    arguments = AsyncEngineArgs(**json.loads(sys.argv[1]))
    config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


if __name__ == "__main__":
    main()
