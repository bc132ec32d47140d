"""Prompts with images on the real engine: a restored prompt equals the engine's own hit bit for bit, and whatever is
another image, or stands in another place, is a miss from the image on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, make_sampling
from tests.vllm.equality import CHUNKS, FLOAT32_ROUNDING, Answer, read_answer, restorable
from tests.vllm.tiny_vision import IMAGE, VISION, Pixels, count_parts, make_image

pytestmark = pytest.mark.vllm

Part = list[int] | Pixels
"""A text or an image."""
Parts = tuple[Part, ...]

BLOCK = VISION.block_size


def acquire(engines: EnginePool) -> Engine:
    return engines.acquire(VISION, kv_transfer_config=probe.transfer(), **CHUNKS)


def ask(engine: Engine, parts: Parts, *, said: int = 8, names: tuple[str, ...] = ()) -> Answer:
    """Asks a prompt of texts and images, which have these names, if any."""
    from transformers.image_transforms import to_pil_image

    images = [to_pil_image(part) for part in parts if not isinstance(part, list)]
    prompt: dict[str, Any] = {"prompt_token_ids": [token for part in parts for token in tokens_of(part)]}
    if images:
        prompt["multi_modal_data"] = {"image": images}
    if names:
        prompt["multi_modal_uuids"] = {"image": list(names)}
    sampling = make_sampling(max_tokens=said, logprobs=3)
    (output,) = engine.llm.generate(prompt, sampling, use_tqdm=False)  # type: ignore[arg-type]
    return read_answer(output, max_tokens=said)


def tokens_of(part: Part) -> list[int]:
    return part if isinstance(part, list) else [IMAGE]


def ask_restored(engine: Engine, parts: Parts, **how: Any) -> tuple[Answer, list[int]]:
    """Returns the answer after the engine's own cache was emptied, and how many tokens each load brought."""
    engine.reset_local()
    with probe.watch_loads(engine) as loads:
        return ask(engine, parts, **how), loads


def length(parts: Parts) -> int:
    return sum(len(part) if isinstance(part, list) else count_parts(part) for part in parts)


def text(seed: int, tokens: int) -> list[int]:
    return make_prompt(seed, tokens)


def with_other_pixel(image: Pixels) -> Pixels:
    """Returns the image with one other pixel, the last one."""
    other = image.copy()
    other[-1, -1] ^= 255
    return other


def with_other_shape(image: Pixels) -> Pixels:
    """Returns an image of the same bytes that is as wide as this one is high."""
    height, width, colours = image.shape
    return image.reshape(width, height, colours)


def make_prompts() -> dict[str, Parts]:
    """Makes prompts by where their images are. An image of 48 tokens is less than a block, one of 200 is more."""
    image, other, large = make_image(1), make_image(2), make_image(3, columns=20, rows=10)
    return {
        "at the beginning": (image, text(1, 400)),
        "within a block": (text(1, 20), image, text(2, 400)),
        "across a block's end": (text(1, 100), image, text(2, 400)),
        "across the end of a step": (text(1, 300), image, text(2, 300)),
        "over a whole block": (text(1, 60), large, text(2, 300)),
        "at the end, so that the hit ends within the image": (text(1, 200), large),
        "two in one block": (text(1, 10), image, text(2, 5), other, text(3, 400)),
        "the same one twice": (text(1, 100), image, text(2, 200), image, text(3, 200)),
    }


def test_a_restored_prompt_with_images_equals_the_engines_own_hit_bit_for_bit(engines: EnginePool) -> None:
    engine = acquire(engines)
    assert engine.llm.model_config.uses_mrope
    for place, parts in make_prompts().items():
        expected = restorable(VISION, length(parts))
        engine.forget()
        assert ask(engine, parts).cached == 0, place
        local = ask(engine, parts)
        restored, loads = ask_restored(engine, parts)
        assert (local.cached, restored.cached, loads) == (expected, expected, [expected]), place
        assert restored == local, place
    assert probe.faults(engine) == {}


def test_zeros_in_the_record_of_any_block_of_an_image_change_the_answer(engines: EnginePool) -> None:
    engine, large = acquire(engines), make_image(3, columns=20, rows=10)
    parts: Parts = (text(1, 60), large, text(2, 4))
    ask(engine, parts)
    right, _ = ask_restored(engine, parts)
    entries = probe.entries(engine)
    assert len(entries) == length(parts) // BLOCK == 2
    for entry in entries:
        with probe.zeroed(engine, entry):
            wrong, loads = ask_restored(engine, parts)
        assert loads == [2 * BLOCK]
        assert wrong.distance(right) > 10 * FLOAT32_ROUNDING, entry
    assert ask_restored(engine, parts) == (right, [2 * BLOCK])


def make_differences() -> dict[str, tuple[Parts, Parts, int]]:
    """Makes two prompts that differ in an image, and how many tokens the second one may take from the first one: those
    of the blocks before the first image that differs."""
    image, other, third = (make_image(seed) for seed in (1, 2, 4))
    large = make_image(3, columns=20, rows=10)
    before, after = text(1, 300), text(2, 400)
    one: Parts = (before, image, after)
    two: Parts = (text(1, 150), image, text(2, 200), other, text(3, 200))
    return {
        "one other pixel": (one, (before, with_other_pixel(image), after), 256),
        "the same bytes in another shape": (one, (before, with_other_shape(image), after), 256),
        "the image one token later": (one, (before + after[:1], image, after[1:]), 256),
        "the image in another block": (one, (before[:200], image, before[200:], after), 128),
        "as many of the image's tokens, and no image": (one, (before + [IMAGE] * count_parts(image) + after,), 256),
        "two images exchanged": (two, (two[0], other, two[2], image, two[4]), 128),
        "another second image": (two, (*two[:3], third, two[4]), 384),
        "one other pixel in the part behind a block's end": (
            (text(1, 228), image, after),
            (text(1, 228), with_other_pixel(image), after),
            128,
        ),
        "one other pixel, and a block of one image alone": (
            (text(1, 60), large, after),
            (text(1, 60), with_other_pixel(large), after),
            0,
        ),
    }


def test_a_difference_in_an_image_is_a_miss_from_the_image_on(engines: EnginePool) -> None:
    engine = acquire(engines)
    for difference, (first, second, shared) in make_differences().items():
        engine.forget()
        ask(engine, first)
        local = ask(engine, second)
        assert local.cached == shared, difference
        engine.forget()
        ask(engine, first)
        before, _ = ask_restored(engine, first)
        found, loads = ask_restored(engine, second)
        assert (found.cached, loads) == (shared, [shared] if shared else []), difference
        assert found == local, difference
        # Both are kept: each is restored with its own bytes.
        own = ask(engine, second)
        assert ask_restored(engine, first) == (before, [restorable(VISION, length(first))]), difference
        assert ask_restored(engine, second) == (own, [restorable(VISION, length(second))]), difference
        assert own != before, difference
    assert probe.faults(engine) == {}


def test_a_conversation_about_an_image_goes_on_from_blocks_that_were_decoded(engines: EnginePool) -> None:
    """Positions of decoded tokens depend on the images before them."""
    engine = acquire(engines)
    question: Parts = (text(1, 100), make_image(3, columns=20, rows=10), text(2, 60))
    first = ask(engine, question, said=40)
    assert IMAGE not in first.tokens, "the answer has a token of images, choose another seed"
    turn: Parts = (*question, [*first.tokens, *text(3, 30)])
    local = ask(engine, turn)
    engine.forget()
    assert ask(engine, question, said=40) == first
    restored, loads = ask_restored(engine, turn)
    assert (local.cached, restored.cached, loads) == (384, 384, [384])
    assert restored == local


def test_an_image_that_has_a_name_is_known_by_its_name(engines: EnginePool) -> None:
    engine = acquire(engines)
    parts: Parts = (text(1, 300), make_image(1), text(2, 400))
    whole = restorable(VISION, length(parts))
    ask(engine, parts, names=("one",))
    assert ask_restored(engine, parts, names=("one",))[1] == [whole]
    assert ask_restored(engine, parts, names=("two",))[1] == [256]
    assert ask_restored(engine, parts)[1] == [256]
