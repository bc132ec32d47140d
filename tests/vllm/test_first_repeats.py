"""A user's first minute: `vllm serve` with our connector and no setting, a prompt as soon as the engine is ready, and
the same prompt again when the engine's own cache has been reset.

The other tests hold engines in this process or wait until everything that was saved is there, and they give the engine
an environment of theirs. This one gives `vllm serve` the environment of a login shell, in which vLLM binds its threads
and lets them spin as it likes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm.engine import make_prompt
from tests.vllm.http_service import UNCHANGED, USERS_ARGUMENTS, Service, list_users_environment, serving_with
from tests.vllm.tiny_deepseek_v4 import WORKER as DEEPSEEK_V4_WORKER
from tests.vllm.tiny_families import BUILDERS

pytestmark = pytest.mark.vllm

PAUSE_S = 0.3
"""Between a prompt and its repeat. The reset takes its place in the engine's own queue."""
PROMPT_TOKENS = 2000
LEAST_RESTORED = 1280
"""Tokens of such a prompt that end at a boundary of every family."""


@dataclass(frozen=True)
class Family:
    """A model, how many ranks serve it, and what `vllm serve` is told besides."""

    name: str
    ranks: int = 1
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name if self.ranks == 1 else f"{self.name}-tp{self.ranks}"


SOME = (Family("windows"), Family("gdn"), Family("full", ranks=2))
LATENTS = (Family("mla"), Family("deepseek-v4", arguments=("--worker-cls", DEEPSEEK_V4_WORKER)))
ALL = (*SOME, Family("full"), Family("mamba"), *LATENTS, Family("chunked"))


@contextmanager
def served_for_a_user(family: Family, folder: Path) -> Iterator[Service]:
    model = folder / "model"
    BUILDERS[family.name](model)
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if family.ranks > 1 else {}
    told = (*USERS_ARGUMENTS, "--tensor-parallel-size", str(family.ranks), *family.arguments)
    environment = list_users_environment() | bound
    with serving_with(environment, model, folder / "log", *told, connector=UNCHANGED) as one:
        yield one


def count_restored(service: Service, prompts: int) -> int:
    """Returns how many repeats of so many prompts were restored."""
    restored = 0
    for seed in range(prompts):
        prompt = make_prompt(seed, PROMPT_TOKENS)
        assert service.ask_for_cached(prompt) == 0
        time.sleep(PAUSE_S)  # what a user does: nothing is waited for
        assert service.reset()
        restored += service.ask_for_cached(prompt) >= LEAST_RESTORED
    return restored


def describe_misses(service: Service) -> str:
    rows = [row for row in service.ask("/metrics").splitlines() if row.startswith("kvoffload_misses_total")]
    return "\n".join([*rows, *service.log.read_text().splitlines()[-20:]])


@pytest.mark.parametrize("family", SOME, ids=str)
def test_first_repeats_are_restored(family: Family, tmp_path: Path) -> None:
    """A user waits for nothing, so on a machine with other work some repeats may come before the save has ended. The
    campaign wants every one of them, on an idle machine."""
    with served_for_a_user(family, tmp_path) as service:
        assert count_restored(service, 8) >= 4, describe_misses(service)


@pytest.mark.campaign
@pytest.mark.parametrize("family", ALL, ids=str)
def test_every_first_repeat_is_restored_on_an_idle_machine(family: Family, tmp_path: Path) -> None:
    with served_for_a_user(family, tmp_path) as service:
        assert count_restored(service, 30) == 30, describe_misses(service)
