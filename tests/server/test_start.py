"""Finding and starting a backend: from a folder of any name, with settings that are the user's own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import platformdirs
import pytest
from platformdirs.macos import MacOS
from servers import BOOTSTRAP, ENVIRONMENT, ROOT, fields
from waiting import PATIENCE

from mixgrpo.backend import client
from mixgrpo.backend.client import Backend, BackendUnreachable, connect
from mixgrpo.backend.places import PlaceError, config_dir, data_dir, write_state
from mixgrpo.backend.settings import backend_python, load_settings

AWKWARD = "custom nodes/Größe – 混合 'GRPO' (1)"

IN_COMFYUI = """
import asyncio, importlib, importlib.util, json, sys
from pathlib import Path

NOT_IN_COMFYUI = {"platformdirs", "typer", "rich", "diffusers", "peft", "accelerate", "matplotlib", "mixgrpo"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in NOT_IN_COMFYUI:
            raise ImportError(f"{name} is no part of ComfyUI")

sys.meta_path.insert(0, Missing())
root = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("some.folder name", root / "__init__.py", submodule_search_locations=[str(root)])
package = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = package
spec.loader.exec_module(package)
client = importlib.import_module(".backend.client", spec.name)
light = "torch" not in sys.modules

async def main():
    first, second = await asyncio.gather(client.connect(), client.connect())
    about = [await first.server(), await second.server()]
    job = await first.finish((await first.submit(json.loads(sys.argv[2])))["id"])
    return {"about": about, "job": job, "light": light}

print(json.dumps(asyncio.run(main())))
"""


def copy_of_the_folder(destination: Path) -> Path:
    """What a clone has: no installation, no settings."""
    destination.mkdir(parents=True)
    shutil.copy(ROOT / "__init__.py", destination)
    shutil.copytree(ROOT / "backend", destination / "backend", ignore=shutil.ignore_patterns("__pycache__"))
    return destination


def test_a_folder_that_was_only_copied_starts_its_own_backend_and_trains(tmp_path):
    folder = copy_of_the_folder(tmp_path / AWKWARD)
    environment = ENVIRONMENT | {
        "MIXGRPO_DATA": str(tmp_path / "data dir ß"),
        "MIXGRPO_CONFIG": str(tmp_path / "config"),
        "MIXGRPO_PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path / "nowhere"),
    }
    script = [sys.executable, "-c", IN_COMFYUI, str(folder), json.dumps(fields(iterations=1))]
    ended = subprocess.run(
        script, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=2 * PATIENCE, check=False
    )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    first, second = answer["about"]
    os.kill(first["pid"], signal.SIGTERM)
    assert first == second, "two starts at once must end with one backend"
    assert first["folder"] == str(folder)
    assert answer["job"]["state"] == "done" and answer["job"]["loras"] == [1]
    assert answer["light"], "the client must not load PyTorch by itself"


def test_the_server_starts_without_pytorch():
    script = "import sys, mixgrpo.backend.server.service as s; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, timeout=PATIENCE, check=False).returncode == 0


@pytest.fixture
def own_places(tmp_path, monkeypatch):
    """Data and settings of this test alone."""
    monkeypatch.setenv("MIXGRPO_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MIXGRPO_CONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("MIXGRPO_PYTHON", raising=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "config").mkdir()
    return tmp_path


def settings(places: Path, text: str, mode: int = 0o600) -> None:
    file = places / "config" / "backends.yaml"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)


def test_without_a_backend_nothing_is_started_unless_wanted(own_places):
    with pytest.raises(BackendUnreachable, match="mixgrpo serve"):
        asyncio.run(connect(start=False))
    assert list((own_places / "data").iterdir()) == []


def test_a_dead_backends_note_is_no_backend(own_places):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
    write_state(own_places / "data", {"address": f"http://127.0.0.1:{port}", "token": "x", "pid": 1})
    with pytest.raises(BackendUnreachable):
        asyncio.run(connect(start=False))
    dead = Backend(f"http://127.0.0.1:{port}", "x")
    with pytest.raises(BackendUnreachable, match="does not answer"):
        asyncio.run(dead.jobs())


def test_a_backend_of_another_version_is_named(own_places, finished, monkeypatch):
    monkeypatch.setenv("MIXGRPO_DATA", str(finished[0].data))
    assert asyncio.run(connect(start=False)) == finished[0].backend
    monkeypatch.setattr("mixgrpo.backend.client.API", 2)
    with pytest.raises(BackendUnreachable, match=f"another version.*process {finished[0].process.pid}"):
        asyncio.run(connect(start=False))


def test_a_backend_that_cannot_start_says_why(own_places, monkeypatch):
    python = own_places / "python"
    python.write_text("#!/bin/sh\necho this is not the Python you want >&2\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setenv("MIXGRPO_PYTHON", str(python))
    with pytest.raises(BackendUnreachable, match="not the Python you want"):
        asyncio.run(connect())
    monkeypatch.setenv("MIXGRPO_PYTHON", str(own_places / "missing"))
    with pytest.raises(PlaceError, match="does not exist"):
        asyncio.run(connect())


def test_aliases_are_the_users(own_places):
    settings(own_places, "backends: {box: {address: 'https://box.example/', token: secret-secret}}")
    box = asyncio.run(connect("box"))
    assert (box.address, box.token) == ("https://box.example", "secret-secret")
    with pytest.raises(BackendUnreachable, match="known: local, box"):
        asyncio.run(connect("https://evil.example"))


def test_a_settings_file_with_a_fault_keeps_its_token(own_places):
    """The sentence is shown in ComfyUI's page."""
    settings(own_places, "backends:\n  box: {address: 'https://box.example', token: very-secret-token\n  other: [")
    with pytest.raises(PlaceError, match="cannot be read as YAML at line 3") as refused:
        load_settings()
    assert "secret" not in str(refused.value) and refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("backends: {box: {address: 'http://box.example', token: t}}", "ssh -L"),
        ("backends: {box: {address: 'file:///etc/passwd', token: t}}", "must look like"),
        ("backends: {box: {address: 'https://box.example'}}", "an address and a token"),
        ("backends: {local: {address: 'https://box.example', token: t}}", "other than local"),
        ("backends: [1]", "maps names"),
        ("python: relative/python", "absolute"),
        ("pyhton: /usr/bin/python3", "nothing else"),
        ("{", "cannot be read as YAML at line 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(own_places, text, cause):
    settings(own_places, text)
    with pytest.raises(PlaceError, match=cause):
        load_settings()


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_settings_that_others_can_read_are_refused(own_places):
    settings(own_places, "backends: {}", 0o644)
    with pytest.raises(PlaceError, match="chmod 600"):
        load_settings()


def test_the_backends_python_is_the_users_then_the_folders_own(own_places, monkeypatch):
    folder = own_places / "folder"
    own = folder / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.setattr("mixgrpo.backend.settings.ROOT", folder)
    assert backend_python() == own
    settings(own_places, f"python: {sys.executable}")
    assert backend_python() == Path(sys.executable)
    monkeypatch.setenv("MIXGRPO_PYTHON", str(own))
    assert backend_python() == own


def test_a_python_that_cannot_train_gets_the_one_command(own_places, monkeypatch):
    monkeypatch.setattr("mixgrpo.backend.settings.ROOT", own_places)
    check = own_places / "check.py"
    check.write_text("import sys; sys.exit('importing diffusers failed (huggingface_hub 0.36)')")
    monkeypatch.setattr("mixgrpo.backend.settings.BOOTSTRAP", check)
    with pytest.raises(PlaceError, match=r"huggingface_hub 0\.36.*-m venv .venv.*pip install -e"):
        backend_python()
    check.write_text("print('ok')")
    assert backend_python() == Path(sys.executable)
    check.unlink()
    assert backend_python() == Path(sys.executable), "a check that was passed is remembered"


def test_places_are_those_of_the_operating_system(monkeypatch):
    for name in ("MIXGRPO_DATA", "MIXGRPO_CONFIG", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert str(config_dir()) == platformdirs.user_config_dir("mixgrpo")
    assert str(data_dir()) == platformdirs.user_data_dir("mixgrpo")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert str(config_dir()) == MacOS("mixgrpo").user_config_dir
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/appdata")
    assert data_dir() == Path("/appdata/mixgrpo/mixgrpo")


def serve(*options: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BOOTSTRAP), "serve", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment, timeout=60, check=False)


def test_a_port_in_use_is_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        ended = serve("--data", tmp_path, "--port", port)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr and "--port" in ended.stderr


def test_listening_to_everybody_needs_a_name_and_a_token_needs_length(tmp_path):
    assert "--allow-host" in serve("--data", tmp_path, "--host", "0.0.0.0").stderr
    assert "MIXGRPO_TOKEN" in serve("--data", tmp_path, MIXGRPO_TOKEN="short").stderr
    file = tmp_path / "file"
    file.touch()
    assert "cannot use" in serve("--data", file / "data").stderr


def test_the_command_line_lists_and_pauses(finished):
    server, job = finished
    script = str(Path(sys.executable).with_name("mixgrpo"))

    def jobs(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = ENVIRONMENT | {"MIXGRPO_DATA": str(server.data), "COLUMNS": "200"}
        return subprocess.run(
            [script, "jobs", *arguments], capture_output=True, text=True, env=environment, timeout=120, check=False
        )

    listed = jobs("list")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert any(job["id"] in line and "done" in line for line in listed.stdout.splitlines())
    assert json.loads(jobs("pause", job["id"]).stdout)["state"] == "done"
    refused = jobs("show", "0123456789abcdef")
    assert refused.returncode == 1 and refused.stdout.startswith("error BackendError: there is no job"), refused.stdout


def test_whoever_stops_waiting_is_not_held_up_by_the_check(tmp_path, monkeypatch):
    """Trying a Python can take a minute; ComfyUI's prompt, an event loop of its own, ends at once all the same."""
    ended = threading.Event()

    def slow_check() -> Path:
        ended.wait(30)
        return Path(sys.executable)

    monkeypatch.setenv("MIXGRPO_DATA", str(tmp_path))
    monkeypatch.setattr(client, "backend_python", slow_check)
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(connect(), 0.2))
    assert time.monotonic() - before < 20
    ended.set()
