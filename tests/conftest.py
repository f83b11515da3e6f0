"""Fixtures for all tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

try:
    import resource
except ImportError:  # Windows
    resource = None

_MEBIBYTE = 2**20


class TinyDisk:
    """A folder whose disk can be full: a small tmpfs where the tests may mount one, else a limit on the size of files."""

    def __init__(self, folder: Path, mounted: bool):
        self.folder, self._mounted = folder, mounted

    @contextmanager
    def full(self, left: int = 0) -> Iterator[None]:
        """Within the block no more than about ``left`` bytes can be written."""
        if not self._mounted:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (left, limits[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            return
        ballast = self.folder / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(self.folder).free - left))
        try:
            yield
        finally:
            ballast.unlink()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[TinyDisk]:
    """A disk of 16 MiB that can be filled. Skipped only where neither a mount nor a limit is possible."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = _mount(folder)
    if not mounted and resource is None:
        pytest.skip("this system lets a test neither mount a small disk nor limit the size of files")
    yield TinyDisk(folder, mounted)
    if mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def _mount(folder: Path) -> bool:
    if shutil.which("mount") is None:
        return False
    mount = ["mount", "-t", "tmpfs", "-o", f"size={16 * _MEBIBYTE}", "mixgrpo-tests", folder]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0
