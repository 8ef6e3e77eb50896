"""What a role says for the record: `journal("judged", submission=..., accepted=True)`.

A world that keeps a log gives every node a journal that adds the time and the node's name; a test may pass a list's
`append` in a lambda. Values are plain JSON values.
"""

from __future__ import annotations

from typing import Any, Protocol


class Journal(Protocol):
    """Writes one record."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


def silent(kind: str, /, **fields: Any) -> None:
    """A journal that keeps nothing."""
