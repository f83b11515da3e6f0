"""Fixtures: servers that end with their test, a finished job to look at, and the uninterrupted run to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import Server, fields

from mixgrpo.backend.server.store import JobStore, State
from mixgrpo.backend.specs.job import parse_job
from mixgrpo.backend.train.worker import train


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server on the test's data folder, or again on the same one."""
    servers: list[Server] = []

    def start(*options: object, **settings: Any) -> Server:
        servers.append(Server(tmp_path / "data", *options, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, Any]]]:
    """A server with a job that is done, for tests that only look."""
    server = Server(tmp_path_factory.mktemp("finished") / "data")
    try:
        job = server.ask("submit", fields())
        yield server, server.wait_for(job["id"], "done")
    finally:
        server.stop()


@pytest.fixture(scope="session")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, Any]]]:
    """A server with a paused job that has never trained; tests put files of their own into its run folder."""
    data = tmp_path_factory.mktemp("idle") / "data"
    data.mkdir(mode=0o700)
    spec = parse_job(fields())
    store = JobStore(data / "jobs.sqlite")
    store.put(spec.identity(), spec.model_dump(mode="json"), State.PAUSED, detached=False)
    store.close()
    for kind in ("lora", "samples"):
        (data / "runs" / spec.identity() / kind).mkdir(parents=True)
    server = Server(data)
    try:
        yield server, server.ask("job", spec.identity())
    finally:
        server.stop()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of ``fields(iterations=16)``, trained without a server or a stop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(folder, parse_job(fields(iterations=16)))
    torch.set_num_threads(threads)
    return folder
