"""Blocks of an engine whose hashes are vLLM's, saved without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.cache import CacheGeometry, GroupRule, Publication
from kvoffload.client import Client, ClientSettings, LinkSettings, Member, describe_blocks
from kvoffload.keys.prompt_hashes import HashSettings, digest_seed, hash_prompt
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import IdentityField, Role
from kvoffload.protocol.message import Event
from tests.kit.cache.cache_model import PLAIN, fingerprint
from tests.kit.server.tiers import await_that

BLOCK = PLAIN.hash_block_size
WIDE = replace(
    PLAIN,
    hash_block_size=2 * BLOCK,
    groups=(replace(PLAIN.groups[0], rule=GroupRule(block_size=2 * BLOCK, reuse=ReuseRule.PREFIX)),),
)
"""Blocks of twice as many tokens."""
SEED = "7"
PATIENT = LinkSettings(acquire_deadline_s=20.0, call_deadline_s=20.0)
"""Waits so long that a busy machine's late answer is no miss, and that its server does not seem to hang."""


@contextmanager
def engine(
    path: Path,
    name: str = "made-up/model",
    *,
    seed: str = SEED,
    algorithm: str = "sha256",
    geometry: CacheGeometry = PLAIN,
    model: str = "",
    revision: str = "",
    on_event: Callable[[Event, int], None] | None = None,
) -> Iterator[Client]:
    revisions = (IdentityField(name="revision", value=revision),) if revision else ()
    register = describe_blocks(
        fingerprint(name),
        geometry,
        hash_algorithm=algorithm,
        hash_seed=digest_seed(seed),
        identity=(IdentityField(name="model", value=model or name), *revisions),
    )
    member = Member(engine=name, role=Role.SCHEDULER)
    settings = ClientSettings(socket=path, member=member, register=register, link=PATIENT)
    with Client(settings, on_event=on_event) as client:
        assert client.wait_until_served(30), client.fault
        yield client


@contextmanager
def engines_that_differ(path: Path) -> Iterator[None]:
    """Two engines of one model, of which the second has blocks of twice as many tokens."""
    with (
        engine(path, "narrow", model="made-up/model", revision="abc"),
        engine(path, "wide", model="made-up/model", geometry=WIDE, revision="abc"),
    ):
        yield


def name_blocks(tokens: Sequence[int], **settings: Any) -> bytes:
    settings = {"algorithm": "sha256", "block_size": BLOCK, "seed": SEED, **settings}
    return hash_prompt(np.array(tokens, np.int64), HashSettings(**settings))


def save(client: Client, hashes: bytes) -> None:
    slots = client.reserve(0, count=len(hashes) // 32)
    assert len(slots) == len(hashes) // 32
    assert client.publish(Publication(slots, hashes=hashes))
    await_that(lambda: bool(client.lookup(0, hashes).all()))
