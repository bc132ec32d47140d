"""Prometheus's own parsers read the written metrics."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from kvoffload.metrics.catalog import find_metric
from kvoffload.metrics.exposition import expose, reading

READINGS = [
    reading("kvoffload_server_up", 1),
    reading("kvoffload_acquires_total", 3, outcome="hit"),
    reading("kvoffload_acquires_total", 4.5, outcome='a "name"\n\\'),
    reading("kvoffload_used_bytes", 2**60, tier="memory", place=""),
]


@pytest.mark.parametrize("is_open", [False, True])
def test_both_formats_are_read_back(is_open: bool) -> None:
    text = expose(READINGS, is_open=is_open).decode()
    parse = parse_open if is_open else parse_plain
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text)
        for sample in family.samples
    }
    assert samples == {(one.name, tuple(sorted(one.labels.items()))): one.value for one in READINGS}
    assert f"# HELP kvoffload_server_up {find_metric('kvoffload_server_up').help}" in text
    assert text.endswith("# EOF\n") is is_open


@pytest.mark.parametrize(
    "wrong",
    [
        reading("kvoffload_surprises_total", 1),
        reading("kvoffload_server_up", 1, tier="disk"),
        reading("kvoffload_acquires_total", 1),
    ],
)
def test_what_is_not_in_the_catalogue_is_refused(wrong: object) -> None:
    with pytest.raises(KeyError):
        expose([wrong], is_open=False)  # type: ignore[list-item]
