"""Which view each audience's readers had in the run before, in ``state_dir``; best effort."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvtierd.logs.events import event
from kvtierd.wire.kvevents import Form
from kvtierd.wire.projection import View

logger = logging.getLogger(__name__)


class ViewFile:
    """The file of one audience. ``known``: the views that its readers may have; several during a change."""

    def __init__(self, state_dir: Path | None, label: str) -> None:
        self._path = None if state_dir is None else state_dir / f"view-{quote(label, safe='')}"
        self.known: tuple[View, ...] = ()
        if self._path is not None:
            try:
                self.known = tuple(_view(body) for body in json.loads(self._path.read_text("ascii")))
            except FileNotFoundError:
                pass
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning(
                    "cannot use %s: %s; its readers are taken to know this view",
                    self._path,
                    error,
                    extra=event("state_not_written", path=str(self._path)),
                )

    def save(self, *views: View) -> None:
        """Keep which views readers may have."""
        if views == self.known:
            return
        self.known = views
        if self._path is None:
            return
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(json.dumps([dataclasses.asdict(view) for view in views], default=sorted), "ascii")
            os.replace(new, self._path)
        except OSError as error:
            logger.warning(
                "cannot write %s: %s; make state_dir writable",
                self._path,
                error.strerror,
                extra=event("state_not_written", path=str(self._path)),
            )


def _view(body: dict[str, Any]) -> View:
    return View(
        **{
            **body,
            "form": Form(body["form"]),
            "media": None if body["media"] is None else frozenset(body["media"]),
            "names": tuple((tier, name) for tier, name in body["names"]),
        }
    )
