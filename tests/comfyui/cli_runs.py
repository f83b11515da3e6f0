"""comfy-cli against the session's server, as a user without a browser runs a saved workflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_NOWHERE = "http://127.0.0.1:9"  # the discard port: whatever comfy-cli wanted from the network fails at once


def comfy_run(url: str, workflow: Path, home: Path, *options: str, timeout: int = 600) -> dict[str, Any]:
    """``comfy run`` of a workflow file in either format; returns what comfy-cli says about it.

    Args:
        home: a folder where comfy-cli may keep its files; nothing is read from the user's own.
        options: more options, ``--wait`` or ``--print-prompt``.

    Raises:
        AssertionError: comfy-cli ended with another code than 0; the message holds what it printed.
    """
    address = urlsplit(url)
    own = {name: str(home) for name in ("HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    quiet = {"DO_NOT_TRACK": "1", "HTTP_PROXY": _NOWHERE, "HTTPS_PROXY": _NOWHERE, "NO_PROXY": address.hostname}
    lower = {name.lower(): value for name, value in quiet.items()}
    command = [sys.executable, "-m", "comfy_cli", "--skip-prompt", "run", "--workflow", str(workflow), *options]
    result = subprocess.run(
        [*command, "--host", address.hostname, "--port", str(address.port), "--timeout", str(timeout)],
        cwd=home, env=os.environ | own | quiet | lower, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        encoding="utf-8", timeout=timeout + 60,
    )  # fmt: skip
    assert result.returncode == 0, f"comfy-cli ended with code {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return json.loads(result.stdout.strip().splitlines()[-1])["data"]
