"""``mixgrpo serve`` and ``mixgrpo jobs``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import console
from ..places import data_dir
from ..settings import LOCAL

jobs = typer.Typer(help="Look at the jobs of a running backend, pause or cancel them.", no_args_is_help=True)
Alias = Annotated[str, typer.Option("--backend", help="A name from backends.yaml; local is this machine's.")]
JobId = Annotated[str, typer.Argument(help="A job's id, as `mixgrpo jobs list` shows it.")]


def serve(
    data: Annotated[
        Path | None, typer.Option(help="Folder of jobs and runs (default: MIXGRPO_DATA, or the user's data folder).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 0,
    allow_host: Annotated[list[str] | None, typer.Option(help="A further name clients may use, for a proxy or tunnel.")] = None,
) -> None:
    """Serve jobs to ComfyUI's nodes and to `mixgrpo jobs`, until Ctrl-C; running jobs pause then and go on at the next start."""
    from .service import ServeOptions
    from .service import serve as run

    run(ServeOptions((data or data_dir()).absolute(), host, port, tuple(allow_host or ())))


async def _ask(alias: str, question: str, *arguments: str) -> Any:
    from ..client import Backend, connect

    return await getattr(Backend, question)(await connect(alias, start=False), *arguments)


def _show(answer: Coroutine[Any, Any, dict[str, Any]]) -> None:
    console.print(json.dumps(asyncio.run(answer), indent=2, ensure_ascii=False), markup=False, soft_wrap=True)


@jobs.command("list")
def list_jobs(backend: Alias = LOCAL) -> None:
    """One line for every job, the newest first."""
    for job in asyncio.run(_ask(backend, "jobs")):
        progress = f"{job['iteration']}/{job['iterations']}"
        console.print(f"{job['id']}  {job['state']:<10} {progress:>11}  {job['name']}", markup=False, soft_wrap=True)


@jobs.command()
def show(job: JobId, backend: Alias = LOCAL) -> None:
    """Everything about one job, as JSON."""
    _show(_ask(backend, "job", job))


@jobs.command()
def pause(job: JobId, backend: Alias = LOCAL) -> None:
    """Stop a job at the next point that can be saved."""
    _show(_ask(backend, "pause", job))


@jobs.command()
def cancel(job: JobId, backend: Alias = LOCAL) -> None:
    """End a job; its checkpoints and LoRAs stay."""
    _show(_ask(backend, "cancel", job))
