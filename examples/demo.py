"""Two conversations on real vLLM, whose cache kvoffload keeps while the engine loses its own.

The first is in words: SmolLM2-135M answers as one can read, each turn is asked again with the engine's cache dropped,
and once more when the engine was started again. In the second a tiny hybrid model (gated delta nets and attention)
answers the same conversation three times: cold, from the engine's own prefix cache, and with that cache dropped before
every turn, restored by kvoffload. Then the engine is started again, and a second one with it: both restore the blocks
that the first one computed. It needs vllm, transformers and an installed kvoffload; no GPU. SmolLM2 comes from a wheel
with the set-up; without it there is only the second part.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests' models and engine settings are the demo's
sys.path.insert(0, str(Path(__file__).parent))

from demo_picture import draw_bars  # noqa: E402
from demo_talk import talk  # noqa: E402
from serving import serve  # noqa: E402

from tests.vllm.connector_probe import resolve_connector  # noqa: E402
from tests.vllm.engine import Engine, make_prompt, prepare_environment, start_engine  # noqa: E402
from tests.vllm.smollm2 import MISSING, is_installed  # noqa: E402
from tests.vllm.tiny_models import GDN, TinyModel  # noqa: E402

TURNS = 5
USER_TOKENS = 700
ANSWER_TOKENS = 24
MAX_RESETS = 10_000


def connector(server: Path) -> dict[str, object]:
    """Engines that are started with it share the pool of the server at this socket.

    Where the machine has other work an answer may be late, and would be a miss: the demo waits for it.
    """
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"server": str(server), "acquire_deadline": "5s"},
    }


# vLLM 0.32 aligns the block size of a hybrid model in its workers; the scheduler's process goes on with the default and
# ends prefill chunks where no state can be kept. Saying the aligned size up front cures it.
ALIGNED = {"block_size": GDN.block_size}
console = Console(highlight=False)


@dataclass(frozen=True)
class Turn:
    """One answer: what came out of which cache, and how long its first token took."""

    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cache-dir", type=Path, default=ROOT / ".cache" / "demo", help="for the model and the picture"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's log instead of writing it to a file")
    options = parser.parse_args()

    options.cache_dir.mkdir(parents=True, exist_ok=True)
    prepare_environment(VLLM_LOGGING_LEVEL="INFO" if options.verbose else "WARNING")
    log = options.cache_dir / "vllm.log"
    log.unlink(missing_ok=True)
    if not options.verbose:  # at the level of the file descriptor: vLLM's processes and its C++ write there too
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o644), sys.stderr.fileno())
    try:
        return run(options.cache_dir)
    except Exception as error:  # noqa: BLE001  (the top of a program: whatever it was ends in a line and a status)
        where = log if log.exists() else "above"
        console.print(f"\n[bold red]failed[/]: {error!r}\nvLLM's log: {where}", soft_wrap=True)
        return 1


def run(folder: Path) -> int:
    with step("import vLLM"):
        import vllm

        import kvoffload
    console.print(f"  kvoffload {kvoffload.__version__}, vLLM {vllm.__version__}, Python {sys.version.split()[0]}")
    is_good = True
    if not is_installed():
        console.print(f"  no conversation in words: {MISSING}", soft_wrap=True)
    else:
        console.print("[bold]a conversation in words[/]: SmolLM2-135M, read from its wheel the first time")
        with serve(memory="1GiB") as server:

            def start_talking(model: TinyModel, at: Path) -> Engine:
                engine = start_engine(model, at, has_own_processes=True, kv_transfer_config=connector(server))
                engine.generate(make_prompt(seed=0, length=USER_TOKENS), max_tokens=2)
                return engine

            is_good = talk(folder, start_talking, reset, console)
    return int(run_hybrid(folder) != 0 or not is_good)


def run_hybrid(folder: Path) -> int:
    """The second part."""
    console.print("[bold]a hybrid model[/]: attention beside gated delta nets, in random numbers")
    with step("build the model"):
        GDN.build(folder / GDN.name)
    with serve(memory="1GiB") as server:
        arguments = {"kv_transfer_config": connector(server), "disable_log_stats": False, **ALIGNED}

        def start() -> Engine:
            engine = start_engine(GDN, folder / GDN.name, has_own_processes=True, **arguments)
            # An engine's first steps compile and allocate; they are not what is shown.
            engine.generate(make_prompt(seed=0, length=USER_TOKENS), max_tokens=ANSWER_TOKENS, logprobs=1)
            return engine

        with step("start a cache server, and an engine with processes of its own and KVOffloadConnector"):
            engine = start()
        with closing(engine):
            console.print(f"  plugin in the worker: {engine.ask_workers(resolve_connector)[0] or 'not registered'}")
            told = show(engine, folder / "demo.svg")
        with step("end that engine, and start it again"):
            engine = start()
        with closing(engine):
            is_equal = told.is_good and ask_again(engine, told.restored, "after a restart")
            with step("start a second engine beside it"):
                second = start()
            with closing(second):
                is_equal = ask_again(second, told.restored, "in a second engine") and is_equal
    return 0 if is_equal else 1


def ask_again(engine: Engine, turns: list[Turn], where: str) -> bool:
    """The last turn once more, of an engine that has never computed it."""
    prompt = [token for number in range(TURNS) for token in (*user_turn(number), *turns[number].answer)]
    prompt = prompt[: len(prompt) - len(turns[-1].answer)]
    turn = answer(engine, prompt)
    is_equal = (turn.answer, turn.logprobs) == (turns[-1].answer, turns[-1].logprobs)
    console.print(
        f"  the last turn {where}: {turn.cached_tokens:,} of {turn.prompt_tokens:,} prompt tokens restored, "
        f"first token after {turn.first_token_s * 1e3:.0f} ms, {'equal' if is_equal else 'DIFFERENT'}",
        soft_wrap=True,
    )
    return is_equal and turn.cached_tokens > 0


@dataclass(frozen=True)
class Shown:
    """Whether the conversation came out as it should, and its restored turns."""

    is_good: bool
    restored: list[Turn]


def show(engine: Engine, picture: Path) -> Shown:
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("conversation", total=3 * TURNS)
        cold = converse(engine, "everything", [], lambda: progress.advance(task))
        own = converse(engine, "nothing", cold, lambda: progress.advance(task))
        restored = converse(engine, "own cache", cold, lambda: progress.advance(task))
    table = Table("turn", "prompt", "cached:\ncold", "\nown", "\nrestored", "first token:\ncold", "\nown", "\nrestored")
    for number, turns in enumerate(zip(cold, own, restored, strict=True), start=1):
        cached = [f"{turn.cached_tokens:,}" for turn in turns]
        times = [f"{turn.first_token_s * 1e3:.0f} ms" for turn in turns]
        table.add_row(str(number), f"{turns[0].prompt_tokens:,}", *cached, *times)
    console.print(table)
    picture.write_text(
        draw_bars(
            "Time to first token by turn (ms)",
            {
                "cold": [turn.first_token_s * 1e3 for turn in cold],
                "engine's own cache, turns before": [turn.first_token_s * 1e3 for turn in own],
                "restored by kvoffload, this turn too": [turn.first_token_s * 1e3 for turn in restored],
            },
        )
    )
    console.print(f"  picture: {picture}", soft_wrap=True)
    pairs = list(zip(own, restored, strict=True))
    is_equal = all((one.answer, one.logprobs) == (other.answer, other.logprobs) for one, other in pairs)
    restored_tokens = sum(turn.cached_tokens for turn in restored)
    console.print(
        f"  answers and logprobs, restored against the engine's own cache: {'equal' if is_equal else 'DIFFERENT'}"
    )
    console.print(f"  {restored_tokens:,} prompt tokens were restored and not computed again")
    return Shown(is_equal and restored_tokens > 0, restored)


def converse(engine: Engine, forgets: str, history: list[Turn], advance: Callable[[], None]) -> list[Turn]:
    """All turns; `forgets` says what is not to be used in each. The answers in the prompts are those of `history`."""
    reset(engine)
    prompt: list[int] = []
    turns: list[Turn] = []
    for number in range(TURNS):
        prompt += user_turn(number)
        if forgets != "nothing":
            reset(engine)
        turns.append(answer(engine, prompt, skip_load=forgets != "own cache"))
        prompt += (history or turns)[number].answer
        advance()
    return turns


def user_turn(number: int) -> list[int]:
    return make_prompt(seed=100 + number, length=USER_TOKENS)


def answer(engine: Engine, prompt: list[int], *, skip_load: bool = False) -> Turn:
    output = engine.generate(prompt, max_tokens=ANSWER_TOKENS, logprobs=1, skip_load=skip_load)
    completion = output.outputs[0]
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return Turn(
        prompt_tokens=len(prompt),
        cached_tokens=output.num_cached_tokens or 0,
        first_token_s=output.metrics.first_token_latency,
        answer=tuple(completion.token_ids),
        logprobs=tuple(row[token].logprob for token, row in rows),
    )


def reset(engine: Engine) -> None:
    """Drops the engine's own cache. It refuses while blocks are pinned for saving; they come free as it steps on."""
    for _ in range(MAX_RESETS):
        if engine.llm.reset_prefix_cache():
            return
    raise RuntimeError("the engine holds blocks that never come free")


@contextmanager
def step(title: str) -> Iterator[None]:
    console.print(f"[bold]{title}[/] ... ", end="", soft_wrap=True)
    started = time.perf_counter()
    yield
    console.print(f"{time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
