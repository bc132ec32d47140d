"""Lines are where their numbers are, and labels stand apart."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from kvoffload.cli.line_chart import draw_amounts, draw_shares

SPACE = "{http://www.w3.org/2000/svg}"


def lines_of(picture: str) -> list[list[tuple[float, float]]]:
    tree = ElementTree.fromstring(picture)
    found = [str(line.get("points")).split() for line in tree.iter(f"{SPACE}polyline")]
    return [[tuple(map(float, point.split(","))) for point in points] for points in found]  # type: ignore[misc]


def test_larger_shares_are_higher_and_larger_sizes_farther() -> None:
    [one, two] = lines_of(draw_shares("t", "x", {"a": [(1, 0.1), (10, 0.3), (100, 0.5)], "b": [(1, 0.1), (100, 0.2)]}))
    assert [x for x, _ in one] == pytest.approx([60, 315, 570])
    assert one[0][1] > one[1][1] > one[2][1]
    assert one[0] == two[0]
    assert two[1][0] == one[2][0]
    assert two[1][1] == pytest.approx((3 * one[0][1] + one[2][1]) / 4, abs=0.1)


def test_labels_do_not_lie_on_one_another() -> None:
    names = [f"policy {at} & <more>" for at in range(6)]
    picture = draw_shares("a & b", "c", {name: [(1, 0.2), (2, 0.4)] for name in names}, dashed=names[2])
    tree = ElementTree.fromstring(picture)
    places = {text.text: float(str(text.get("y"))) for text in tree.iter(f"{SPACE}text")}
    ends = sorted(places[name] for name in names)
    assert all(after - before >= 14.9 for before, after in itertools.pairwise(ends))
    assert picture.count("stroke-dasharray") == 1
    assert not re.search(r"(href|src)=", picture), "it needs nothing else"


@pytest.mark.parametrize("lines", [{}, {"a": []}, {"a": [(5.0, 0.0)]}])
def test_little_to_draw_is_a_picture_too(lines: dict[str, list[tuple[float, float]]]) -> None:
    ElementTree.fromstring(draw_shares("t", "x", lines))


@pytest.mark.parametrize(
    ("most", "ticks"),
    [(0.35, ["0", "0.1", "0.2", "0.3"]), (3.7, ["0", "1", "2", "3", "4"]), (800.0, ["0", "250", "500", "750"])],
)
def test_amounts_stand_beside_round_numbers(most: float, ticks: list[str]) -> None:
    picture = draw_amounts("t", "x", {"a": [(1, most / 2), (10, most)]}, name_size=lambda size: f"{size:g} B")
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SPACE}text")]
    assert texts == ["t", "x", *ticks, "1 B", "10 B", "a"]
    [[first, last]] = lines_of(picture)
    assert first[1] > last[1]
