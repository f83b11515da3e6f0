"""Waiting for something that another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 240.0


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait for a true value and return it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {seconds:g} seconds")
