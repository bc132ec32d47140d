"""Requests from one seed, with shared prefixes, aborts and preemptions, and what must be true after the last one."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from tests.kit.open_files import count_open_files
from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.equality import Answer, answer
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel
from tests.vllm.workload import MAX_STEPS, BlockLedger, Run, watch_blocks

FAMILIES = 5
MAX_UNDER_WAY = 14
ANSWER_TOKENS = 6
MARGIN = 0.25
"""See `decided_tokens`."""
COUNTERS = ("preemptions", "planned_loads", "doomed_loads", "evicted", "mismatches")
LEAST = {
    "preemptions": 1,
    "planned_loads": 4,
    "aborted": 5,
    "compared_tokens": 80,
    "equal_to_own_hits": 1,
}
"""Least counts of each event. Counts that depend on the times of copies vary from run to run, far above these."""
UNHELD = {"reserved", "readable", "used_bytes", "stored_bytes", "sessions", "open_files"}
"""Counts of the pool and its neighbours that need not be 0 at rest."""


@dataclass(frozen=True)
class Traffic:
    """A model, in an engine with too few blocks for those under way, and a pool with too few for all prompts."""

    model: TinyModel
    num_blocks: int
    max_model_len: int
    max_batched_tokens: int
    longest: int
    """Blocks of a prompt."""
    max_running: int
    rounds_far: bool = False
    """A token after a prefill may be another than after decoding, however decided it seems: see `GDN_TRAFFIC`."""
    pool_bytes: int = 0
    """For readable blocks; 0: all that the server has."""

    def arguments(self) -> dict[str, object]:
        """Returns the engine's arguments."""
        return {
            "num_gpu_blocks_override": self.num_blocks,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_batched_tokens,
            "max_num_seqs": self.max_running,
            "kv_transfer_config": probe.transfer(verify="always", memory="64MiB"),
            **probe.INSPECTED,
        }

    def acquire(self, engines: EnginePool, *, has_own_processes: bool = False) -> Engine:
        return engines.acquire(self.model, has_own_processes=has_own_processes, **self.arguments())

    def make_prompts(self, rng: random.Random, number: int) -> dict[str, list[int]]:
        """Each begins as its family does, for as long as it happens to. Half of them end a few tokens before a block
        does, so that decoding needs another one."""
        size = self.model.block_size
        families = [make_prompt(rng.randrange(1 << 30), self.longest * size) for _ in range(FAMILIES)]
        prompts = {}
        for i in range(number):
            nearly_whole = size * rng.randint(1, self.longest) - rng.choice([1, 3, 5])
            length = rng.choice([nearly_whole, rng.randrange(20, self.longest * size)])
            shared = rng.randrange(length)
            own = make_prompt(rng.randrange(1 << 30), length - shared)
            prompts[f"prompt{i}"] = families[i % FAMILIES][:shared] + own
        return prompts


DENSE_TRAFFIC = Traffic(
    DENSE, 18, max_model_len=768, max_batched_tokens=256, longest=4, max_running=6, pool_bytes=7 << 20
)
SLIDING_TRAFFIC = Traffic(
    SLIDING, 40, max_model_len=768, max_batched_tokens=256, longest=4, max_running=10, pool_bytes=9 << 20
)
# Its records are of two sizes, which no neighbour can fill the pool with. It rounds far, without any connector too:
# after one prompt of seed 4 the engine says 149, 10, 273, with a lead of 1.3 at the third token, and after the same
# prompt with 149, 10 behind it 354. A request that is preempted goes that way.
GDN_TRAFFIC = Traffic(GDN, 25, max_model_len=2048, max_batched_tokens=1400, longest=3, max_running=4, rounds_far=True)


@dataclass(frozen=True)
class Ask:
    """One request of the run."""

    name: str
    prompt: str
    max_tokens: int
    steps_until_abort: int | None


def make_asks(rng: random.Random, prompts: list[str], number: int) -> list[Ask]:
    return [
        Ask(
            name=f"request{i}",
            prompt=rng.choice(prompts),
            max_tokens=rng.choice([6, 12, 24, 48]),
            steps_until_abort=rng.randrange(6) if rng.random() < 0.2 else None,
        )
        for i in range(number)
    ]


def serve_asks(engine: Engine, asks: list[Ask], prompts: Mapping[str, list[int]]) -> Run:
    """Keeps as many under way as there is room for, and aborts those that ask for it after their number of steps."""
    run = Run(engine)
    waiting, under_way = list(reversed(asks)), dict[str, tuple[Ask, int]]()
    while waiting or under_way:
        assert run.steps < MAX_STEPS * (1 + len(asks) // 100), f"{len(waiting)} waiting, {sorted(under_way)} do not end"
        while waiting and len(under_way) < MAX_UNDER_WAY:
            ask = waiting.pop()
            run.add(ask.name, prompts[ask.prompt], max_tokens=ask.max_tokens)
            under_way[ask.name] = (ask, run.steps)
        late = [
            ask.name
            for ask, begun in under_way.values()
            if ask.steps_until_abort is not None and run.steps - begun >= ask.steps_until_abort
        ]
        run.abort(*late)
        if not run.is_done:
            run.step()
        under_way = {name: found for name, found in under_way.items() if name not in late and name not in run.outputs}
    engine.drain()
    return run


def find_own_hits(engine: Engine, prompts: Mapping[str, list[int]]) -> dict[str, Answer]:
    """Returns the engine's answers from its own cache, one request at a time. Leaves all caches empty."""
    hits = {}
    for name, prompt in prompts.items():
        answer(engine, prompt, max_tokens=1)
        hits[name] = answer(engine, prompt, max_tokens=ANSWER_TOKENS)
        engine.forget()
    return hits


def decided_tokens(hit: Answer) -> tuple[int, ...]:
    """The first tokens, up to where another chunk shape might choose otherwise: see `workload.decided_tokens`."""
    for place, step in enumerate(hit.logprobs):
        if step[0][1] - step[1][1] < MARGIN:
            return hit.tokens[:place]
    return hit.tokens


def run_traffic(engine: Engine, traffic: Traffic, *, requests: int, prompts: int, seed: int) -> dict[str, int]:
    """Counts of what happened. Raises where a request is lost, an output or a byte is wrong, or something is left.

    Bytes are compared in an engine in this process.
    """
    rng = random.Random(seed)
    texts = traffic.make_prompts(rng, prompts)
    asks = make_asks(rng, list(texts), requests)
    hits = find_own_hits(engine, texts)
    files = _count_files(engine)
    probe.ask_core(engine, "limit_pool", traffic.pool_bytes)
    before = probe.ask_core(engine, "inspect_scheduler")
    try:
        with nullcontext() if engine.has_own_processes else watch_blocks(engine) as ledger:
            run = serve_asks(engine, asks, texts)
        after = probe.ask_core(engine, "inspect_scheduler")
        restored = _compare_restored(engine, texts, hits)
    finally:
        probe.ask_core(engine, "limit_pool", 0)
    counts = {name: after.pop(name) - before[name] for name in COUNTERS}
    assert after["reserved"] == before["reserved"], "more is reserved than what the neighbour holds"
    assert after["open_files"] == before["open_files"]
    left = {name: count for name, count in after.items() if count and name not in UNHELD}
    assert not left, left
    left_files = _count_files(engine)
    assert left_files == files, (left_files, files)
    assert counts["mismatches"] == counts["doomed_loads"] == 0
    assert probe.faults(engine) == {}
    compared, different = _compare_outputs(run, asks, hits)
    for ask, place in different:
        said = run.tokens(ask.name)
        assert traffic.rounds_far, (ask, place)
        assert is_said_after_a_prefill(engine, texts[ask.prompt], said, place), (ask, place, said)
    engine.reset_local()
    return {
        **counts,
        "requests": requests,
        "aborted": requests - len(run.outputs),
        "compared_tokens": compared,
        "different_outputs": len(different),
        "equal_to_own_hits": restored,
        **({} if ledger is None else _check_bytes(ledger)),
    }


def _count_files(engine: Engine) -> list[int]:
    """Counts the open files of this process, and of each worker's."""
    gc.collect()  # objects of engines that have ended may still hold some
    return [count_open_files(), *engine.ask_workers(lambda _worker: count_open_files())]


def _compare_restored(engine: Engine, prompts: Mapping[str, list[int]], hits: Mapping[str, Answer]) -> int:
    """How many prompts are restored as far as the engine's own hit went; each answer is that one, bit for bit."""
    equal = 0
    for name, prompt in prompts.items():
        engine.reset_local()
        found = answer(engine, prompt, max_tokens=ANSWER_TOKENS)
        if found.cached and found.cached == hits[name].cached:
            assert found == hits[name], name
            equal += 1
    engine.drain()
    return equal


def is_said_after_a_prefill(engine: Engine, prompt: list[int], said: list[int], place: int) -> bool:
    """Whether the engine itself, with all caches empty, goes on so after the prompt and some of what was said."""
    for known in range(1, place + 1):
        engine.forget()
        again = answer(engine, prompt + said[:known], max_tokens=place + 1 - known)
        if list(again.tokens) == said[known : place + 1]:
            return True
    return False


def _compare_outputs(run: Run, asks: list[Ask], hits: Mapping[str, Answer]) -> tuple[int, list[tuple[Ask, int]]]:
    """How many tokens were compared, and who said something else from which place on."""
    compared, different = 0, []
    for ask in asks:
        output = run.outputs.get(ask.name)
        if output is None:
            assert ask.steps_until_abort is not None, f"{ask} is lost"
            continue
        assert output.outputs[0].finish_reason == "length"
        tokens = run.tokens(ask.name)
        assert len(tokens) == ask.max_tokens
        expected = list(decided_tokens(hits[ask.prompt])[: ask.max_tokens])
        place = next((at for at, token in enumerate(expected) if tokens[at] != token), len(expected))
        if place < len(expected):
            different.append((ask, place))
        compared += place
    return compared, different


def _check_bytes(ledger: BlockLedger) -> dict[str, int]:
    assert all(ledger.restored)
    assert all(ledger.saved.values())
    return {"restored_blocks": len(ledger.restored)}


def assert_it_was_what_it_claims(counts: Mapping[str, int]) -> None:
    """Preempted, restored and aborted did happen, and there was something to compare."""
    few = {name: counts[name] for name, least in LEAST.items() if counts[name] < least}
    assert not few, f"too few of {few}, {dict(counts)}"
