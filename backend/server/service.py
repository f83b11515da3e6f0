"""The server process: one per data folder, from taking its lock to handing it back."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from filelock import FileLock, Timeout

from ..errors import MixGRPOError
from ..places import API, data_dir, private_folder, remove_state, write_state
from .app import LOOPBACK_NAMES, Activity, make_app
from .loras import LoraFiles
from .store import JobStore
from .supervisor import Supervisor

_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})
_STOP_GRACE = 10.0
_TOKEN_LENGTH = 16


class ServeError(MixGRPOError):
    """The server cannot start as asked."""


@dataclass(frozen=True)
class ServeOptions:
    """How to serve.

    Attributes:
        data: folder of jobs and runs.
        host: address to bind to.
        port: 0 takes any free one.
        allow_hosts: further names under which a proxy or tunnel addresses this server.
        with_parent: standard input is a pipe from whoever started this; when it ends and nobody asks for ``idle`` seconds,
            jobs that are not detached are paused, and the server ends once no job goes on.
    """

    data: Path
    host: str = "127.0.0.1"
    port: int = 0
    allow_hosts: tuple[str, ...] = ()
    with_parent: bool = False
    idle: float = 60.0

    @property
    def names(self) -> frozenset[str]:
        """The names in Host headers that are answered."""
        own = frozenset() if self.host in _ANY_ADDRESS else frozenset({self.host.lower()})
        return LOOPBACK_NAMES | own | frozenset(name.lower() for name in self.allow_hosts)


def serve(options: ServeOptions) -> None:
    """Serve until told to stop; raises :class:`ServeError` when the folder, the address or the token cannot be used."""
    if options.host in _ANY_ADDRESS and not options.allow_hosts:
        raise ServeError(
            f"listening on {options.host} needs --allow-host NAME: the name or address that clients use for this machine"
        )
    lock = FileLock(private_folder(options.data) / "server.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ServeError(
            f"another backend serves {options.data}; use that one, stop it, or choose another folder with --data"
        ) from None
    try:
        token = _token()
        listener = _listen(options.host, options.port)
        with listener:
            asyncio.run(_serve(options, listener, token))
    finally:
        lock.release()


def _token() -> str:
    """A new one for every start, unless the user has set one for clients elsewhere."""
    token = os.environ.get("MIXGRPO_TOKEN", "")
    if not token:
        return secrets.token_urlsafe(32)
    if len(token) < _TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ServeError(f"MIXGRPO_TOKEN must have at least {_TOKEN_LENGTH} printable ASCII characters and no spaces")
    return token


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise ServeError(f"cannot listen on {host} port {port}: {error}") from error
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServeError(f"cannot listen on {host} port {port}: {error}; choose another with --port, or 0 for any") from error
    return listener


async def _serve(options: ServeOptions, listener: socket.socket, token: str) -> None:
    store = JobStore(options.data / "jobs.sqlite")
    supervisor = Supervisor(store, options.data / "runs", LoraFiles(options.data / "loras"))
    activity, stop = Activity(), asyncio.Event()
    about = {"api": API, "pid": os.getpid(), "folder": str(Path(__file__).resolve().parents[2])}
    runner = web.AppRunner(make_app(supervisor, token, options.names, activity, about), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    address = _address(listener)
    write_state(options.data, {"address": address, "token": token, "pid": os.getpid()})
    print(f"serving {options.data} on {address}; the token is in {options.data / 'server.json'}", flush=True)
    _stop_on_signals(stop)
    tasks = [asyncio.create_task(supervisor.serve()), asyncio.create_task(stop.wait())]
    if options.with_parent:
        tasks.append(asyncio.create_task(_outlive_parent(supervisor, activity, options.idle)))
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # an error in the queue ends the server, loudly
    finally:
        remove_state(options.data)
        await supervisor.close(_STOP_GRACE)
        for task in tasks:
            task.cancel()
        await runner.cleanup()
        store.close()


def _address(listener: socket.socket) -> str:
    """An address on this machine that reaches the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        if os.name == "posix":
            loop.add_signal_handler(number, stop.set)
        else:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))


async def _outlive_parent(supervisor: Supervisor, activity: Activity, idle: float) -> None:
    """Returns when the parent is gone, nobody asks any more, and no job goes on."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        while os.read(0, 4096):
            pass
        if not loop.is_closed():
            loop.call_soon_threadsafe(gone.set)

    threading.Thread(target=wait, daemon=True).start()
    await gone.wait()
    while True:
        if activity.idle_seconds >= idle:
            supervisor.pause_attached()
            if not supervisor.busy:
                return
        await asyncio.sleep(min(idle, 1.0))


def main(arguments: list[str]) -> None:
    """``serve`` without the command line's packages, as nodes start it."""
    parser = argparse.ArgumentParser(prog="serve", allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--allow-host", action="append", default=[])
    parser.add_argument("--with-parent", action="store_true")
    parser.add_argument("--idle", type=float, default=60.0)
    given = parser.parse_args(arguments)
    data = (given.data or data_dir()).absolute()
    try:
        serve(ServeOptions(data, given.host, given.port, tuple(given.allow_host), given.with_parent, given.idle))
    except MixGRPOError as error:
        sys.exit(f"{type(error).__name__}: {error}")
