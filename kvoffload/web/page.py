"""The page: one file that needs nothing else, and may connect only to us."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from importlib.resources import files

from kvoffload.metrics.labels import describe_labels
from kvoffload.web.http_message import Response

_LABELS = "/* labels */"
"""Where the page has them, once: they are its words for what is counted by a name."""
_INLINE = {
    "script-src": re.compile("<script>(.*?)</script>", re.DOTALL),
    "style-src": re.compile("<style>(.*?)</style>", re.DOTALL),
}


def read_page() -> Response:
    text = (files("kvoffload.web") / "page.html").read_text(encoding="utf-8")
    text = text.replace(_LABELS, json.dumps(describe_labels()))
    return Response(
        body=text.encode(),
        content_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": make_policy(text), "Referrer-Policy": "no-referrer"},
    )


def make_policy(text: str) -> str:
    """Only the page's own script and style may run, by their digests. No other page may put it into a frame."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "frame-ancestors 'none'"]
    for rule, pattern in _INLINE.items():
        digests = [b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in pattern.findall(text)]
        rules.append(" ".join([rule, *(f"'sha256-{digest}'" for digest in digests)]))
    return "; ".join(rules)
