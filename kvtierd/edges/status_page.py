"""The status page: one HTML file with its style and script inside, and the JSON that it shows.

The page only reads. Its policy lets it run its own script and style, known by their digests, and ask this
port; nothing else can be loaded, embedded or sent, so that a name that an engine chose can do no harm.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

from kvtierd.edges.admin import Answer, Route, as_json


def page_routes(page: Callable[[], dict[str, Any]]) -> dict[str, Route]:
    """Return the routes of the page and of what it shows, which ``page`` makes."""
    html = resources.files("kvtierd.edges").joinpath("status_page.html").read_bytes()
    answer = Answer(
        200,
        "text/html; charset=utf-8",
        html,
        (
            ("content-security-policy", policy(html.decode())),
            ("referrer-policy", "no-referrer"),
            ("x-frame-options", "DENY"),
        ),
    )
    return {"/": lambda _: answer, "/page.json": lambda _: as_json(200, page())}


def policy(html: str) -> str:
    """Return the Content-Security-Policy under which exactly the page's own script and style run."""

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert found, f"the page has no {tag}"
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found
        )

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')};"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
