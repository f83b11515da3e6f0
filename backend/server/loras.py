"""LoRA files that jobs start from: received over HTTP, kept under the hash of their bytes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from ..errors import MixGRPOError
from ..files import StorageError
from ..places import LORA_BYTES, private_folder

_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnknownLora(MixGRPOError):
    """The backend does not have that LoRA file."""


class BadLora(MixGRPOError):
    """What was sent is no safetensors file."""


class LoraTooLarge(MixGRPOError):
    """What was sent is larger than any LoRA may be."""


class LoraFiles:
    """A folder of LoRA files called by their SHA-256. One server owns it; it needs no PyTorch."""

    def __init__(self, folder: Path, limit: int = LORA_BYTES):
        self._folder, self._limit = private_folder(folder), limit
        for unfinished in self._folder.glob(".*.part"):  # of a server that was killed
            unfinished.unlink()

    def find(self, digest: str) -> Path:
        """The file of a hash; raises :class:`UnknownLora`."""
        if not _DIGEST.fullmatch(digest) or not self._file(digest).is_file():
            raise UnknownLora(f"this backend has no LoRA {digest[:64]!r}; send the file first (POST /v1/loras)")
        return self._file(digest)

    def check_size(self, size: int) -> None:
        """Raise :class:`LoraTooLarge` for more bytes than are taken."""
        if size > self._limit:
            raise LoraTooLarge(f"a LoRA file may have up to {self._limit} bytes, this one has {size} or more; use a smaller rank")

    async def receive(self, blocks: AsyncIterator[bytes]) -> str:
        """Keep the file whose bytes these are and return its SHA-256; a file that is here already is received again in vain.

        Raises:
            BadLora: it is no safetensors file. LoraTooLarge: it is too long. StorageError: the disk.
        """
        part = self._folder / f".{secrets.token_hex(8)}.part"
        digest, size = hashlib.sha256(), 0
        try:
            with open(part, "xb") as file:
                async for block in blocks:
                    size += len(block)
                    self.check_size(size)
                    digest.update(block)
                    await asyncio.to_thread(file.write, block)
                await asyncio.to_thread(_flush, file)
            await asyncio.to_thread(_check, part)
            target = self._file(digest.hexdigest())
            if not target.exists():
                os.replace(part, target)
        except OSError as error:
            raise StorageError(f"cannot keep the LoRA in {self._folder}: {error}; free some space, then send it again") from error
        finally:
            part.unlink(missing_ok=True)
        return digest.hexdigest()

    def _file(self, digest: str) -> Path:
        return self._folder / f"{digest}.safetensors"


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check(file: Path) -> None:
    """Read the header alone; with NumPy's name, since that of PyTorch would import it."""
    try:
        with safe_open(str(file), framework="numpy"):
            pass
    except (SafetensorError, ValueError) as error:
        raise BadLora(
            f"what was sent is not a whole safetensors file ({error}); pickle files (.pt, .ckpt, .bin) are never loaded, convert "
            "them to safetensors first"
        ) from error
