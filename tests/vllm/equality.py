"""Answers of engines that restored a prompt, compared with those of the engine's own hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, cache_shapes, make_prompt
from tests.vllm.tiny_models import DENSE, GDN, MLA, SLIDING, TinyModel

if TYPE_CHECKING:
    from vllm import RequestOutput

LENGTHS = (129, 255, 256, 257, 640, 641, 1280, 1281, 2700)


MLA_LENGTHS = (129, 143, 144, 145, 257, 700, 1281, 2700)


FLOAT32_ROUNDING = 1e-3


MIN_MARGIN = 4e-3


@dataclass(frozen=True)
class Case:
    """One engine. Prompts longer than `max_num_batched_tokens` are prefilled in chunks, most of no whole blocks."""

    name: str
    model: TinyModel
    arguments: Mapping[str, object] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS
    has_own_processes: bool = False

    @property
    def keeps_all_boundaries(self) -> bool:
        """A hit may end wherever a block does."""
        kinds = set(self.model.layer_kinds)
        return kinds <= {"FullAttentionSpec", "MLAAttentionSpec"} or (
            kinds == {"FullAttentionSpec", "SlidingWindowSpec"}
            and self.arguments.get("prefix_cache_retention_interval", 0) is None
        )

    def acquire(self, engines: EnginePool) -> Engine:
        return engines.acquire(
            self.model,
            has_own_processes=self.has_own_processes,
            kv_transfer_config=probe.transfer(),
            **self.arguments,
        )


CHUNKS = {"max_num_batched_tokens": 320}


GDN_CHUNKS = {"max_num_batched_tokens": 700}  # the engine wants a whole block of 640 in each


DENSE_CASE = Case("dense", DENSE, CHUNKS)


SLIDING_CASE = Case("sliding", SLIDING, CHUNKS)


GDN_CASE = Case("gdn", GDN, GDN_CHUNKS)


# Its windows are kept wherever a hit can end; those of SLIDING_CASE only where hits can be expected.
WINDOWS_CASE = Case("sliding-all-windows", SLIDING, CHUNKS | {"prefix_cache_retention_interval": None})


LOCAL_CASES = (
    DENSE_CASE,
    SLIDING_CASE,
    WINDOWS_CASE,
    GDN_CASE,
    Case("dense-fp8", DENSE, CHUNKS | {"kv_cache_dtype": "fp8"}),
    Case("dense-fp8_e5m2", DENSE, CHUNKS | {"kv_cache_dtype": "fp8_e5m2"}),
)


# vLLM turns prefix caching and chunked prefill off for MLA on a CPU.
MLA_CASE = Case("mla", MLA, lengths=MLA_LENGTHS)


def each(*cases: Case, scope: Literal["session", "module"] = "session") -> pytest.MarkDecorator:
    """The scope makes pytest run all tests of one case, then those of the next: one engine start for each.

    It tells cases by their place in the list, so each list begins like LOCAL_CASES.
    """
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name, scope=scope)


@dataclass(frozen=True)
class Answer:
    """The answer of a run, for comparison with `==`, and how much of its prompt came from a cache."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]  # for each token, the likeliest first
    cached: int = field(compare=False)

    @property
    def margin(self) -> float:
        """By how much the chosen tokens lead, at the least."""
        return min(step[0][1] - step[1][1] for step in self.logprobs)

    def distance(self, other: Answer) -> float:
        """The largest difference between the logprobs of chosen tokens."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(mine[0][1] - theirs[0][1]) for mine, theirs in pairs)


def answer(engine: Engine, prompt: list[int], *, max_tokens: int = 8, salt: str = "") -> Answer:
    """Several tokens, so that what was restored is read again and again."""
    return read_answer(engine.generate(prompt, max_tokens=max_tokens, logprobs=3, salt=salt), max_tokens=max_tokens)


def read_answer(output: RequestOutput, *, max_tokens: int = 8) -> Answer:
    """Returns what an engine has said. Its request has asked for logprobs."""
    completion = output.outputs[0]
    assert len(completion.token_ids) == max_tokens
    assert completion.logprobs is not None
    steps = ({token: entry.logprob for token, entry in step.items()} for step in completion.logprobs)
    ranked = tuple(tuple(sorted(step.items(), key=lambda item: (-item[1], item[0]))) for step in steps)
    assert output.num_cached_tokens is not None
    return Answer(tuple(completion.token_ids), ranked, output.num_cached_tokens)


def restored_answer(engine: Engine, prompt: list[int]) -> Answer:
    engine.reset_local()
    return answer(engine, prompt)


def restorable(model: TinyModel, length: int) -> int:
    """How much of a prompt that was computed before can be restored.

    One token must be computed for the first logits. Of the rest, all whole blocks that end where every group's blocks
    end: full attention wants every block before such a boundary, and all were saved; a window wants its last blocks,
    and all were saved; a recurrent state must be of the boundary itself, and the one that the engine offers is the
    last before the prompt's last token, which is this one.
    """
    return (length - 1) // model.block_size * model.block_size


def check_own_hit(engines: EnginePool, case: Case) -> None:
    """Checks that a restored run equals the own hit of the engine, bit for bit."""
    engine = case.acquire(engines)
    for length in case.lengths:
        prompt, expected = make_prompt(length, length), restorable(case.model, length)
        assert answer(engine, prompt).cached == 0, length
        local = answer(engine, prompt)
        engine.reset_local()
        restored = answer(engine, prompt)
        assert (local.cached, restored.cached) == (expected, expected), length
        assert restored == local, length
    assert probe.faults(engine) == {}


def check_every_repeat(engine: Engine, model: TinyModel, lengths: Sequence[int]) -> None:
    """Checks an engine that has not served a request yet. The very first request is one of a single step: nothing keeps
    the engine stepping after it but the connector."""
    first = make_prompt(899, 641)
    answer(engine, first, max_tokens=1)
    engine.reset_local()
    assert answer(engine, first, max_tokens=1).cached == restorable(model, 641)
    for seed, length in enumerate(lengths, start=900):
        prompt, expected = make_prompt(seed, length), restorable(model, length)
        assert answer(engine, prompt).cached == 0
        local = answer(engine, prompt)
        assert local.cached == expected
        restored = restored_answer(engine, prompt)
        assert (restored.cached, restored) == (expected, local)


def check_restored_bytes(engines: EnginePool, case: Case) -> None:
    """Checks that restored blocks hold the bytes of their records."""
    engine = case.acquire(engines)
    prompt = make_prompt(seed=5, length=1700)
    answer(engine, prompt)
    engine.reset_local()
    with probe.watch_load_jobs(engine) as jobs, probe.watch_loads(engine) as loads:
        assert answer(engine, prompt).cached == restorable(case.model, len(prompt))
    (job,) = jobs
    assert loads == [restorable(case.model, len(prompt))]
    moves = list(zip(job.moves.groups.tolist(), job.moves.blocks.tolist(), job.moves.addresses.tolist(), strict=True))
    assert {group for group, _, _ in moves} == set(range(len(case.model.groups)))
    for group, block, address in moves:
        record = engine.ask_workers(probe.record_digests, [(group, address)])
        assert engine.ask_workers(probe.block_digests, group, [block]) == record


def check_every_byte(engines: EnginePool, case: Case) -> None:
    """Checks that the proof of a registration accounts for all bytes of the engine's cache, layer by layer."""
    engine = case.acquire(engines)
    for report, shape in zip(engine.ask_workers(probe.completeness_report), cache_shapes(engine), strict=True):
        print(report["text"])
        ((allocation,), (storage_bytes,)) = report["allocations"], report["storage_bytes"]
        parts = [allocation[part] for part in ("page_bytes", "excluded_bytes", "padding_bytes")]
        assert sum(parts) == allocation["size_bytes"]
        assert 0 <= storage_bytes - allocation["size_bytes"] < 4096
        found = sorted((int(label.split(".")[2]), size) for label, size in allocation["layers"].items())
        pages = [page for group in shape.groups for page in group.layer_pages]
        assert found == sorted((layer, shape.num_blocks * page_bytes) for layer, page_bytes in pages)
        assert report["num_blocks"] == shape.num_blocks
        assert report["elsewhere"] == []
    records = [sum(page_bytes for _, page_bytes in group.layer_pages) for group in shape.groups]
    assert engine.ask_workers(probe.record_bytes) == [records] * len(engine.ask_workers(probe.record_bytes))


def check_zeros_are_seen(engines: EnginePool, case: Case) -> None:
    """Checks that zeros in the place of any record change the answer."""
    engine, prompt = case.acquire(engines), one_boundary(case.model)
    answer(engine, prompt)
    right = restored_answer(engine, prompt)
    # Of a window model there are records of the prompt's own boundary, and none that is not needed for it.
    entries = probe.entries(engine)
    assert sorted(entry.group for entry in entries) == list(range(len(case.model.groups)))
    for entry in entries:
        with probe.zeroed(engine, entry):
            wrong = restored_answer(engine, prompt)
        assert wrong.cached == case.model.block_size, entry
        assert wrong != right, entry
        assert wrong.distance(right) > 10 * FLOAT32_ROUNDING, entry
    assert restored_answer(engine, prompt) == right


def one_boundary(model: TinyModel) -> list[int]:
    """A prompt that leaves one record for each group, and no second one while it is answered.

    Its end is near the boundary, because recurrent states fade: some hundred tokens later what was restored is little.
    """
    return make_prompt(seed=8, length=model.block_size + 6)


def second_turns(engine: Engine, *, said: int) -> tuple[Answer, list[int], Answer]:
    """A conversation's second answer from the engine's own cache, what it loaded nevertheless, and from ours."""
    question, more = make_prompt(seed=8, length=1200), make_prompt(seed=9, length=30)
    engine.forget()
    first = answer(engine, question, max_tokens=said)
    turn = question + list(first.tokens) + more
    restored = restored_answer(engine, turn)
    engine.forget()  # that turn has saved more than the first one
    again = answer(engine, question, max_tokens=said)
    assert (again.cached, again) == (0, first)
    probe.drain(engine)
    with probe.watch_loads(engine) as external:
        local = answer(engine, turn)
    return local, external, restored
