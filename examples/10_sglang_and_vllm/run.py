"""vLLM and SGLang on one cache server: one pool for both, in which each engine finds its own blocks.

The two need other packages, so each has an environment of its own, with kvoffload in both. This program starts a
server, and both engines at the same time: `with_vllm.py` and `with_sglang.py` ask the same prompt, empty the engine's
own cache, and ask again:

    python examples/10_sglang_and_vllm/run.py MODEL --vllm VENV/bin/python --sglang VENV/bin/python

`--vllm-arguments` and `--sglang-arguments` are more of the engines' own, as JSON. Exit code 0: each engine has restored
its prompt with an equal answer, and neither has found a block of the other's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from prompt import PAGE, PROMPT
from serving import serve

from kvoffload.client import Client, ClientSettings, Member
from kvoffload.protocol import Role

ENGINES_WAIT_S = 1800.0
"""For both, which may have to load a large model first."""
FOLDER = Path(__file__).parent
RESTORED = (len(PROMPT) - 1) // PAGE * PAGE
RIGHT = f": 0 of {len(PROMPT)} tokens were cached at first, {RESTORED} when its own cache was emptied; answers equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name in ("vllm", "sglang"):
        parser.add_argument(f"--{name}", required=True, metavar="PYTHON", help="of the environment that has it")
        parser.add_argument(f"--{name}-arguments", default="{}", metavar="JSON", help="more of its own")
    options = vars(parser.parse_args())
    said = []
    with serve(memory="1GiB") as server, ExitStack() as ending:
        engines = []
        for name in ("vllm", "sglang"):
            command = [
                options[name],
                FOLDER / f"with_{name}.py",
                options["model"],
                server,
                options[f"{name}_arguments"],
            ]
            # In a group with all processes that it starts.
            engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            ending.callback(end, engine)
            engines.append(engine)
        until_s = time.monotonic() + ENGINES_WAIT_S
        for engine in engines:
            written, _ = engine.communicate(timeout=max(0.0, until_s - time.monotonic()))
            # Other lines that an engine writes are left out.
            said += [line.rstrip() for line in written.splitlines() if "were cached at first" in line]
        with Client(ClientSettings(socket=server, member=Member(engine="example", role=Role.OBSERVER))) as client:
            assert client.wait_until_served(60), client.fault
            blocks = client.stats().readable
    print("\n".join(said))
    print(f"{blocks} blocks of {PAGE} tokens in the pool")
    return 0 if len(said) == len(engines) and all(line.endswith(RIGHT) for line in said) else 1


def end(engine: subprocess.Popen[str]) -> None:
    """One that has not ended by itself: another one failed, or it takes too long."""
    if engine.poll() is None:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()


if __name__ == "__main__":
    sys.exit(main())
