"""Can this Python train? Imports all that the server and a worker need, because only importing finds versions that clash."""

from __future__ import annotations

import importlib
import sys

NEEDED = ("aiohttp", "filelock", "yaml", "pydantic", "scipy", "rich", "torch", "transformers", "diffusers", "peft")
"""By the names they are imported under."""


def main(arguments: list[str]) -> None:
    """Exit with one sentence when something is missing or clashes, else print ``ok``."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError) as error:  # RuntimeError: how transformers reports an import of its own that failed
            cause = " ".join(str(error).split())[:300]
            sys.exit(f"{sys.executable} cannot train: importing {name} failed ({cause})")
    print("ok")
