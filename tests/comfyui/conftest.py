"""Fixtures: a real ComfyUI, and the starter's files as ComfyUI's users have them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from comfyui_tree import LayoutError, comfyui_root, import_comfy
from graph_server import GraphServer
from starter_files import SHIPPED, STARTERS, write_random_starter
from starter_graph import load_graph

from mixgrpo.backend.client import Backend, connect


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """The folder of a real ComfyUI."""
    try:
        return comfyui_root()
    except LayoutError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def comfy(comfyui: Path) -> ModuleType:
    """ComfyUI's ``comfy`` package, imported into the test process, on the CPU."""
    return import_comfy(comfyui)


@pytest.fixture(scope="session")
def random_starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the starter's four parts and random weights."""
    return write_random_starter(tmp_path_factory.mktemp("starter"))


@pytest.fixture(scope="session", params=STARTERS)
def starter(request: pytest.FixtureRequest) -> Path:
    """A folder with the starter's four parts: with random weights, and as shipped."""
    return SHIPPED if request.param == "shipped" else request.getfixturevalue("random_starter")


@pytest.fixture(scope="session")
def graph(comfy: ModuleType, request: pytest.FixtureRequest) -> SimpleNamespace:
    """The starter as shipped, or else with random weights, as a graph holds it."""
    return load_graph(SHIPPED if "shipped" in STARTERS else request.getfixturevalue("random_starter"))


@pytest.fixture(scope="session")
def server(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GraphServer]:
    """The one ComfyUI server of a test session, with the pack in a read-only folder with spaces and non-ASCII letters."""
    shipped = "shipped" in STARTERS
    weights = SHIPPED if shipped else write_random_starter(tmp_path_factory.mktemp("starter-for-server"))
    running = GraphServer(comfyui, tmp_path_factory.mktemp("comfyui") / "für alle Fälle ✓", weights)
    yield running
    running.close()


@pytest.fixture(scope="session")
def backend(server: GraphServer) -> Backend:
    """The training backend of the server's graphs, running; it ends with the server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.places.items():
            patch.setenv(name, value)
        return asyncio.run(connect())
