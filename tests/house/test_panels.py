"""Panels query metrics of the right kind, and each has a help text."""

from __future__ import annotations

import re

from docs.panels import INTERVAL, PANEL_ROWS, Shown
from kvoffload.metrics.catalog import find_metric
from kvoffload.metrics.metric import Kind, Unit

PANELS = [panel for row in PANEL_ROWS for panel in row.panels]


def test_each_panel_says_what_it_is_for() -> None:
    assert len({(row.title, panel.title) for row in PANEL_ROWS for panel in row.panels}) == len(PANELS)
    for panel in PANELS:
        assert panel.help.endswith(".")
        assert len(panel.queries) == 1 or all(query.legend for query in panel.queries)


def test_counters_are_asked_how_fast_they_rise_and_gauges_what_they_are() -> None:
    for panel in PANELS:
        for query in panel.queries:
            for name in re.findall(r"kvoffload_\w+", query.expression):
                metric = find_metric(name.removesuffix("_bucket"))
                chosen = re.escape(INTERVAL)
                is_rate = re.search(rf"rate\({name}(?:{{[^}}]*}})?\[{chosen}\]\)", query.expression) is not None
                assert is_rate == (metric.kind is not Kind.GAUGE), query.expression


def test_units_are_those_of_the_metrics() -> None:
    units = {
        Shown.BYTES: {Unit.BYTES},
        Shown.BYTES_PER_SECOND: {Unit.BYTES, Unit.BYTES_PER_SECOND},
        Shown.SECONDS: {Unit.SECONDS},
        Shown.PER_SECOND: {Unit.NONE},
        Shown.COUNT: {Unit.NONE, Unit.SECONDS},
        Shown.STATE: {Unit.NONE},
    }
    for panel in PANELS:
        found = {
            find_metric(name.removesuffix("_bucket")).unit
            for query in panel.queries
            for name in re.findall(r"kvoffload_\w+", query.expression)
        }
        assert found <= units.get(panel.shown, {Unit.NONE, Unit.BYTES, Unit.RATIO}), panel.title


def test_legends_name_labels_that_are_left() -> None:
    for panel in PANELS:
        for query in panel.queries:
            summed = re.findall(r"sum by \(([^)]*)\)", query.expression)
            names = re.findall(r"kvoffload_\w+", query.expression)
            left = {label.strip() for group in summed for label in group.split(",")} or {
                label for name in names for label in find_metric(name).labels
            }
            assert set(re.findall(r"{{(\w+)}}", query.legend)) <= left, query
