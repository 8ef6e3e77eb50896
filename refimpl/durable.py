"""Small files that are on disk whole or not at all, whenever the power goes."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes | memoryview, hidden: Path) -> None:
    """Write `path` by way of `hidden`, a name in the same folder that nobody reads; when this returns, it is there for
    good. Raises OSError, a full disk's too, and then nothing new is there."""
    try:
        with hidden.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)  # it is there only where something went wrong
    sync_folder(path.parent)  # the new name itself


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
