"""The demo's first part: a conversation in words, and how long its first words take with and without kvoffload."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.vllm.engine import Engine, Json
from tests.vllm.smollm2 import SMOLLM2

Starts = Callable[..., Engine]
Resets = Callable[[Engine], None]

ANSWER_TOKENS = 120
ASKED_TOKENS = 4
"""Tokens of an answer that is asked again: only the first of them takes long."""
NOTES = """You help a writer with a novel. These are the notes for it, and whatever you write keeps to them.
The place: Hallig, a small town on an island in a cold sea. It has one harbour, one street of shops, a church without a
bell, and a lighthouse on the northern cliff. The bell was lost when the ship that brought it went down in sight of the
harbour, eighty years ago. Fishermen say that it can be heard before a storm. Nobody has a car; whoever needs to go far
takes the ferry, which comes on Tuesdays if the wind allows it.
The people: Ada Brandt, sixty years old, keeps the lighthouse. She was a teacher of mathematics, and counts everything:
steps, gulls, waves. Her brother Jonas repairs boats, and has not spoken to her since their father died. Mira, twelve
years old, came to the island with her grandmother a year ago; she collects what the sea brings, and has a shelf of
bottles, each with a label. Mr Osei is the postman, the ferryman's friend, and the only one who knows all the stories.
The beginning: after a storm in November Mira finds a green bottle with a letter in it. The paper is dry, the writing is
in pencil, and the date on it is of the year in which the bell was lost. It is addressed to the keeper of the light.
What happens later: the letter names a place below the cliff that can be reached only at the lowest tide, twice a year.
Ada has counted the tides for thirty years, and knows the day. For the first time since their father's death she has to
ask Jonas for something: his boat.
The tone: quiet, exact, kind. Short sentences. No magic that is not explained in the end. The sea is never described as
angry. Every chapter ends with a number that Ada has counted."""
QUESTIONS = (
    "Who is Ada, and what does she do?",
    "Write the first lines of the chapter in which Mira brings the letter to the lighthouse.",
    "What does Ada say when she has read it?",
    "Suggest a title for this chapter.",
)


@dataclass(frozen=True)
class Said:
    """An answer, or its beginning."""

    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    text: str
    tokens: tuple[int, ...]


def talk(folder: Path, start: Starts, reset: Resets, console: Console) -> bool:
    """Whether every answer went on as the engine's own cache lets it. `start`: an engine with the connector."""
    if not (folder / SMOLLM2.name).exists():
        SMOLLM2.build(folder / SMOLLM2.name)
    prompts: list[list[int]] = []
    with closing(start(SMOLLM2, folder / SMOLLM2.name)) as engine:
        tokenizer = engine.llm.get_tokenizer()
        messages = [{"role": "system", "content": NOTES}]
        computed, own, restored = [], [], []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
            console.print(f"\n  [bold]{question}[/]\n  ", end="")
            reset(engine)
            said = ask(engine, prompts[-1], ANSWER_TOKENS, on_text=lambda new: console.out(new, end=""), skip_load=True)
            computed.append(said)
            messages.append({"role": "assistant", "content": said.text})
            console.print()
        for prompt in prompts:
            own.append(ask(engine, prompt, ASKED_TOKENS, skip_load=True))
            reset(engine)
            restored.append(ask(engine, prompt, ASKED_TOKENS))
    with closing(start(SMOLLM2, folder / SMOLLM2.name)) as engine:
        again = [ask(engine, prompt, ASKED_TOKENS) for prompt in prompts]
    console.print()
    console.print(tabulate(computed, restored, again))
    is_equal = all(
        one.tokens == other.tokens for some in (restored, again) for one, other in zip(own, some, strict=True)
    )
    console.print(f"  answers, restored against the engine's own cache: {'equal' if is_equal else 'DIFFERENT'}")
    return is_equal and restored[-1].cached_tokens > 0 and again[0].cached_tokens > 0


def tabulate(computed: Sequence[Said], restored: Sequence[Said], again: Sequence[Said]) -> Table:
    """A row for each turn."""
    table = Table(
        "turn", "prompt", "from the pool", "first token:\ncomputed", "\nrestored", "\nafter a restart, restored"
    )
    for number, (one, two, three) in enumerate(zip(computed, restored, again, strict=True), start=1):
        times = [f"{said.first_token_s * 1e3:.0f} ms" for said in (one, two, three)]
        table.add_row(str(number), f"{one.prompt_tokens:,}", f"{two.cached_tokens:,}", *times)
    return table


def ask(
    engine: Engine,
    prompt: list[int],
    max_tokens: int,
    *,
    on_text: Callable[[str], None] = lambda new: None,
    **wishes: Json,
) -> Said:
    """Greedy, with a little against repetition; `on_text` hears of words as they come."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, repetition_penalty=1.1, max_tokens=max_tokens, extra_args={"kv_transfer_params": wishes}
    )
    core, begun_s, first_s, told = engine.llm.llm_engine, time.perf_counter(), 0.0, ""
    core.add_request(f"turn-{begun_s}", {"prompt_token_ids": prompt}, sampling)
    output = None
    while core.has_unfinished_requests():
        for output in core.step():
            first_s = first_s or time.perf_counter() - begun_s
            on_text(output.outputs[0].text[len(told) :])
            told = output.outputs[0].text
    assert output is not None
    return Said(len(prompt), output.num_cached_tokens or 0, first_s, told, tuple(output.outputs[0].token_ids))
