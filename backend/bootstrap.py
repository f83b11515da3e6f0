"""Runs a part of this project from the folder it lies in, whatever the folder's name and whether installed or not:

    python /any/where/backend/bootstrap.py serve | worker | check | about  [arguments]

Neither PYTHONPATH nor the current directory matters, since portable Pythons ignore both. Uses the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "mixgrpo"
PARTS = {
    "serve": "backend.server.service",
    "worker": "backend.train.worker",
    "check": "backend.server.check",
    "about": "backend.doctor.about",
}


def register(root: Path) -> None:
    """Make the folder importable as ``mixgrpo``, before any installed copy of that name."""
    here = os.path.normcase(os.path.abspath(os.path.dirname(__file__)))
    sys.path[:] = [entry for entry in sys.path if os.path.normcase(os.path.abspath(entry or os.getcwd())) != here]
    spec = importlib.util.spec_from_file_location(PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)])
    if spec is None or spec.loader is None:
        sys.exit(f"{root} is not this project's folder: it has no __init__.py")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)


def main(arguments: list[str]) -> None:
    """Run the part that the first argument names."""
    if not arguments or arguments[0] not in PARTS:
        sys.exit(f"say what to run: {', '.join(PARTS)}")
    register(Path(__file__).resolve().parents[1])
    importlib.import_module(f"{PACKAGE}.{PARTS[arguments[0]]}").main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
