"""The Grafana dashboard, made from the panels of docs/panels.py."""

from __future__ import annotations

import json
from typing import Any

from docs.panels import PANEL_ROWS, Panel, Shown

_WIDTH, _HEIGHT, _A_LINE = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_FROM_ZERO = (Shown.SHARE, Shown.STATE)


def render_dashboard() -> str:
    """Renders the dashboard as JSON that Grafana can import."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in PANEL_ROWS:
        panels.append(
            {"type": "row", "title": row.title, "id": len(panels) + 1, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )
        y += 1
        for number, panel in enumerate(row.panels):
            line, column = divmod(number, _A_LINE)
            place = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += -(-len(row.panels) // _A_LINE) * _HEIGHT
    dashboard = {
        "title": "kvoffload",
        "uid": "kvoffload",
        "description": "Made by docs/generate.py from docs/panels.py.",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["kvoffload"],
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.shown.value, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    if panel.shown in _FROM_ZERO:
        defaults |= {"min": 0, "max": 1}
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query.expression, "legendFormat": query.legend, "datasource": _SOURCE}
            for at, query in enumerate(panel.queries)
        ],
    }
