"""Bringing a file from a backend over connections that may break: what has come stays, the rest is asked for."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp

from .errors import MixGRPOError
from .files import StorageError

TRIES = 5
"""Tries in a row that do not get at least a mebibyte further, after which a transfer is given up."""
PAUSE = 0.5
"""Seconds before the second of them; every further one waits twice as long."""
_MEBIBYTE = 2**20

Ask = Callable[[dict[str, str]], AbstractAsyncContextManager[aiohttp.ClientResponse]]
"""Asks for the file with further headers."""


class TransferBroken(MixGRPOError):
    """A file did not arrive, or not as announced; the message is the last cause alone."""


async def transfer(
    ask: Ask, require: Callable[[aiohttp.ClientResponse], Awaitable[None]], sha256: str, destination: Path
) -> Path:
    """Write a file to ``destination``, which is there only when the bytes' hash is ``sha256``.

    Args:
        require: raises the backend's refusal of an answer, if it is one; that ends the transfer.

    Raises:
        TransferBroken: several tries in a row brought next to nothing.
        StorageError: the file cannot be written.
    """
    part = _Part(destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.part"))
    try:
        part.restart()
        try:
            await _fill(part, ask, require, sha256)
            os.replace(part.path, destination)
        finally:
            part.path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {destination}: {error}; free some space, or make the folder writable") from error
    return destination


async def _fill(part: _Part, ask: Ask, require: Callable[[aiohttp.ClientResponse], Awaitable[None]], sha256: str) -> None:
    tries, farthest = 0, 0
    while part.sha256 != sha256:
        try:
            async with ask(part.missing()) as answer:
                if answer.status == 416:  # the file is shorter than what has come of it
                    cause = "the file has changed meanwhile"
                    part.restart()
                else:
                    await require(answer)
                    cause = await part.take(answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            cause = str(error) or type(error).__name__
        if part.held >= farthest + _MEBIBYTE:
            tries, farthest = 0, part.held
        tries += 1
        if part.sha256 != sha256:
            if tries >= TRIES:
                raise TransferBroken(cause)
            await asyncio.sleep(PAUSE * 2 ** (tries - 1))


class _Part:
    """The beginning of a file, and which version of it this is the beginning of."""

    def __init__(self, path: Path):
        self.path, self.held = path, 0
        self._version: str | None = None
        self._hash = hashlib.sha256()
        self._complete = False

    @property
    def sha256(self) -> str:
        """Of what has come so far."""
        return self._hash.hexdigest()

    def restart(self) -> None:
        """Begin again with nothing."""
        self.path.write_bytes(b"")
        self.held, self._version, self._hash, self._complete = 0, None, hashlib.sha256(), False

    def missing(self) -> dict[str, str]:
        """Headers that ask for the rest; for all of it when what has come turned out wrong."""
        if self._complete:
            self.restart()
        return {"Range": f"bytes={self.held}-"} if self.held else {}

    async def take(self, answer: aiohttp.ClientResponse) -> str:
        """Take in an answer; returns what is wrong should the hash not be the right one then."""
        version = answer.headers.get("X-Checksum-SHA256")
        if answer.status == 206:
            begins = answer.headers.get("Content-Range", "").startswith(f"bytes {self.held}-")
            if version != self._version or not begins:
                self.restart()
                return "the file has changed meanwhile"
        else:
            self.restart()  # all of it, whatever was asked for
            self._version = version
        with open(self.path, "ab") as file:
            async for block in answer.content.iter_chunked(_MEBIBYTE):
                file.write(block)
                self._hash.update(block)
                self.held += len(block)
        self._complete = True
        return "it arrived damaged, or has changed meanwhile"
