"""A report is one file that reads well anywhere, and says what was measured and nothing else."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvoffload.bench.base import Bound, Goal, Measure, Result
from kvoffload.bench.report import describe_machine, find_processor, render_report


def result(name: str = "toy", value: float = 1.0, limit: float = 2.0, goal: Goal | None = None) -> Result:
    return Result(name=name, value=value, unit="B/s", limit=limit, spread=0.1, goal=goal, params={"what": "<put>"})


class Reader(HTMLParser):
    """Reads the text that a browser would show, and the addresses that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.fetched: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def test_a_row_a_result_and_a_table_a_benchmark() -> None:
    at_least, at_most = Goal(Measure.RATIO, Bound.AT_LEAST, 0.4), Goal(Measure.VALUE, Bound.AT_MOST, 0.5)
    rows = [result(goal=at_least), result(goal=at_most), result(name="other", value=9.0)]
    page = Reader(render_report(rows, {"toy": "How\n  fast?"}, {"kernel": "a & b"}))
    assert [row[2:] for row in page.rows if row[0] != "what"] == [
        ["1", "2", "B/s", "0.500", "10.0%", "ratio ≥ 0.4", "yes"],
        ["1", "2", "B/s", "0.500", "10.0%", "B/s ≤ 0.5", "no"],
        ["9", "2", "B/s", "4.500", "10.0%", "", ""],
    ]
    assert [row[0] for row in page.rows].count("what <put>") == 3
    assert "How fast?" in page.text
    assert "kernel: a & b" in page.text
    assert page.fetched == [], "it needs nothing else"


@pytest.mark.parametrize(("value", "width"), [(0.0, "0.0%"), (2.0, "66.7%"), (3.0, "100.0%"), (50.0, "100.0%")])
def test_bars_end_where_the_ratio_is(value: float, width: str) -> None:
    assert f'<i style="width:{width}">' in render_report([result(value=value)], {}, {})


def test_the_machine_is_described_without_its_name(tmp_path: Path) -> None:
    import platform

    told = describe_machine()
    assert told["processors"].isdigit()
    assert platform.node() not in told.values()
    assert find_processor(tmp_path / "none") == ""
    (tmp_path / "cpuinfo").write_text("vendor_id : x\nmodel name\t: A Fast One\n")
    assert find_processor(tmp_path / "cpuinfo") == "A Fast One"
