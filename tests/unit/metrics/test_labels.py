"""Everything that is counted by a name has words for people, each its own."""

from __future__ import annotations

import re

from kvoffload.metrics.catalog import CATALOG
from kvoffload.metrics.labels import CALLS, OUTCOMES, SHOWN, SMALLER, describe_labels
from kvoffload.protocol import Miss


def labels_of(metric: str, label: str) -> set[str]:
    [text] = [one.labels[label] for one in CATALOG if one.name == metric]
    return set(re.findall(r"\w+", re.sub(r"\([^)]*\)|or why they were computed", "", text))) - {"or"}


def test_each_outcome_and_call_of_the_catalogue_has_words() -> None:
    assert labels_of("kvoffload_prompt_tokens_total", "outcome") == set(OUTCOMES) - {"other"}
    assert {miss.name.lower() for miss in Miss} <= set(OUTCOMES)
    calls = {f"call {name}" for name in labels_of("kvoffload_call_seconds", "call")}
    assert calls | {"promotion", "residence"} == set(CALLS)
    assert labels_of("kvoffload_memory_smaller", "reason") == set(SMALLER)


def test_words_are_no_identifiers_and_meanings_are_sentences() -> None:
    for labels in (OUTCOMES, CALLS, SHOWN, SMALLER):
        assert len({one.words for one in labels.values()}) == len(labels)
        for one in labels.values():
            assert "_" not in one.words
            assert one.meaning[0].isupper()
            assert one.meaning.endswith(".")


def test_the_page_is_given_all_of_them() -> None:
    assert describe_labels()["outcomes"]["evicted"] == [OUTCOMES["evicted"].words, OUTCOMES["evicted"].meaning]
