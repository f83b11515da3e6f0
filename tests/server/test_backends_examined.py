"""The doctor asks real backends: one that is well, one with another token, one that is dead, one that is none."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mixgrpo.backend.doctor import checks
from mixgrpo.backend.doctor.findings import as_json
from mixgrpo.backend.places import write_state


@pytest.fixture
def configure(finished, tmp_path, monkeypatch):
    """Write backends.yaml; the data folder is an empty one."""
    monkeypatch.setenv("MIXGRPO_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("MIXGRPO_DATA", str(tmp_path / "data"))
    (tmp_path / "config").mkdir()
    (tmp_path / "data").mkdir()

    def write(**backends):
        file = tmp_path / "config" / "backends.yaml"
        rows = [f"  {name}: {{address: '{address}', token: '{token}'}}" for name, (address, token) in backends.items()]
        file.write_text("\n".join(["backends:", *rows]))
        file.chmod(0o600)
        return tmp_path / "data"

    return write


def states():
    """By alias, level and state; nothing that is said holds a token."""
    findings = checks.backend_findings() + checks.settings_findings()
    assert "secret" not in as_json(findings)
    return {one.facts["alias"]: (one.level, one.facts.get("state")) for one in findings if "alias" in one.facts}


class Other(BaseHTTPRequestHandler):
    """Something else that speaks HTTP; below /old a backend of another version."""

    def do_GET(self):
        body = b'{"api": 999}' if self.path.startswith("/old/") else b"hello"
        self.send_response(200 if self.path.startswith("/old/") else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def other():
    server = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_every_backend_is_asked_and_no_token_is_shown(finished, configure, other):
    server, _ = finished
    with socket.create_server(("127.0.0.1", 0)) as busy:
        dead = f"http://127.0.0.1:{busy.getsockname()[1]}"
    address = server.state["address"]
    data = configure(
        good=(address, server.state["token"]),
        wrong=(address, "secret"),
        dead=(dead, "secret"),
        old=(f"{other}/old", "secret"),
        none=(other, "secret"),
        password=(dead.replace("//", "//me:secret@"), "x"),
    )
    assert states() == {
        "local": ("note", None),
        "good": ("ok", "ok"),
        "wrong": ("fault", "bad token"),
        "dead": ("fault", "unreachable"),
        "old": ("fault", "other version"),
        "none": ("fault", "not a backend"),
        "password": ("fault", "unreachable"),
    }
    assert server.state["token"] not in as_json(checks.backend_findings())
    write_state(data, server.state)
    assert states()["local"] == ("ok", "ok")
    write_state(data, server.state | {"address": dead})
    assert states()["local"] == ("note", None)
