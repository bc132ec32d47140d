"""Sizes are those of keys and cache."""

from __future__ import annotations

from dataclasses import fields

from kvoffload.cache import CacheGroup, GroupRule
from kvoffload.keys.identity import Identity, LayerDtype, ParallelShape
from kvoffload.protocol import GroupTerms
from kvoffload.protocol.limits import MAX_IDENTITY


def test_a_group_says_all_that_the_cache_asks_of_it() -> None:
    asked = {field.name for field in fields(CacheGroup)} - {"rule"} | {field.name for field in fields(GroupRule)}
    assert {field.name for field in fields(GroupTerms)} == asked


def test_the_parts_of_an_identity_fit() -> None:
    identity = Identity(
        engine="e",
        model="m",
        revision="r",
        model_config={},
        model_dtype="bfloat16",
        layers=(LayerDtype(layer="l", dtype="bfloat16"),),
        geometry={},
        parallel=ParallelShape(),
        hash_algorithm="sha256",
        hash_seed="",
    )
    assert len(identity.describe()) <= MAX_IDENTITY
