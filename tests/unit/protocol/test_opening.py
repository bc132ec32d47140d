"""Terms are those of keys and cache."""

from __future__ import annotations

from dataclasses import fields

from kvoffload.cache import CacheGroup, GroupRule
from kvoffload.cache.terms import RULE_NUMBERS
from kvoffload.keys.identity import Identity, LayerDtype, ParallelShape
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import GroupTerms, Reuse
from kvoffload.protocol.limits import MAX_IDENTITY


def test_rules_have_the_numbers_of_the_cache() -> None:
    assert {rule.name: rule.value for rule in Reuse} == {rule.name: RULE_NUMBERS[rule] for rule in ReuseRule}


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
