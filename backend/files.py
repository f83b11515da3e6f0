"""Writing files so that a crash, a full disk or a kill never leaves a half-written one behind."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from .errors import MixGRPOError

if TYPE_CHECKING:  # the server writes files too, and starts without PyTorch
    import torch

_PART = ".part"


class StorageError(MixGRPOError):
    """A file could not be written or read; the message names the file, the cause and the way out."""


def write_atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """Call ``write(temporary)`` in a folder beside ``path``, flush the file to the disk and rename it to ``path``.

    The temporary file has a folder to itself because safetensors writes to a hidden file of its own first, which a kill would
    leave behind, and readable for its owner alone, which would follow the rename.

    Raises:
        StorageError: the file could not be written (disk full, folder not writable); ``path`` is untouched.
    """
    path = Path(path)
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    temporary = folder / path.name
    try:
        folder.mkdir(parents=True)
        open(temporary, "xb").close()
        mode = _mode(temporary)
        write(temporary)
        if _mode(temporary) != mode:
            temporary.chmod(mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write {path}: {error}; nothing saved before was changed — free some space or choose another folder, "
            "then run the same command again"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def remove_leftovers(folder: Path) -> None:
    """Delete what writers that were killed left unfinished under ``folder``; call it only when nobody writes there."""
    for unfinished in list(Path(folder).rglob(f".*{_PART}")):
        shutil.rmtree(unfinished, ignore_errors=True)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a safetensors file atomically. ``metadata`` values are strings, as the format demands."""
    from safetensors.torch import save_file

    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return write_atomically(path, lambda temporary: save_file(contiguous, temporary, dict(metadata or {})))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file on the CPU.

    Raises:
        StorageError: the file is missing, truncated, or not safetensors (a pickle, for example).
    """
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        raise StorageError(f"{path} does not exist; check the name, or run the step that writes it")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise StorageError(
            f"{path} is not a readable safetensors file ({error}); it is truncated or of another format — "
            "pickle files (.pt, .ckpt, .bin) are never loaded, convert them to safetensors first"
        ) from error


def load_metadata(path: Path) -> dict[str, str]:
    """The string metadata in a safetensors header; raises :class:`StorageError` like :func:`load_tensors`."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise StorageError(f"{path} is not a readable safetensors file ({error})") from error


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal; raises :class:`StorageError` when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}; check the name") from error


def known_sha256(path: Path) -> str:
    """:func:`sha256_of`, computed once for a file of this path, size and time of change."""
    try:
        status = path.stat()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}; check the name") from error
    return _known_sha256(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _known_sha256(path: Path, _size: int, _changed: int) -> str:
    return sha256_of(path)


def save_json(path: Path, value: Any) -> Path:
    """Write indented JSON atomically; refuses NaN and infinities, which JSON cannot hold."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def load_json(path: Path) -> Any:
    """Read a JSON file; raises :class:`StorageError` when it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
