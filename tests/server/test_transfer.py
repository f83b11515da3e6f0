"""Downloads over connections that break, from a real server through a proxy that cuts them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import secrets
from pathlib import Path

import pytest
from cutting_proxy import CuttingProxy

from mixgrpo.backend import transfer
from mixgrpo.backend.client import Backend, BackendError, BackendUnreachable
from mixgrpo.backend.files import StorageError

MEBIBYTE = 2**20
SIZE = 6 * MEBIBYTE
HEAD = 2000  # an answer's head is shorter


class Link:
    """A LoRA of a job, and a way to it that breaks."""

    def __init__(self, server, job, monkeypatch, destination):
        self.server, self.job, self.destination = server, job, destination
        self.lora = server.run_folder(job["id"]) / "lora" / "far_000800.safetensors"
        self.replace(secrets.token_bytes(SIZE))
        monkeypatch.setattr(transfer, "PAUSE", 0.001)
        self.proxy = None

    def replace(self, content: bytes) -> bytes:
        """As the worker writes: another file under the same name, with a time of its own."""
        new = self.lora.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, self.lora)
        return content

    def artifact(self, kind="lora", name="far_000800.safetensors"):
        return next(one for one in self.server.ask("artifacts", self.job["id"]) if (one["kind"], one["name"]) == (kind, name))

    def download(self, cuts, artifact=None, on_cut=lambda: None) -> bytes:
        self.proxy = CuttingProxy(self.server.backend.address, iter(cuts), on_cut)
        far = Backend(self.proxy.address, self.server.backend.token)
        try:
            file = asyncio.run(far.download(self.job["id"], artifact or self.artifact(), self.destination / "here"))
            return file.read_bytes()
        finally:
            self.proxy.close()

    def ranges(self) -> list[int | None]:
        """From which byte on each request asked."""
        asked = (re.search(r"Range: bytes=(\d+)-", head) for head in self.proxy.asked)
        return [None if found is None else int(found.group(1)) for found in asked]

    @property
    def left(self) -> list[Path]:
        return list(self.destination.iterdir())


@pytest.fixture
def link(idle, monkeypatch, tmp_path):
    made = Link(*idle, monkeypatch, tmp_path)
    yield made
    made.lora.unlink(missing_ok=True)


def test_a_broken_transfer_goes_on_where_it_broke(link):
    content = link.lora.read_bytes()
    assert link.download([2 * MEBIBYTE, 3 * MEBIBYTE]) == content
    first, second, third = link.ranges()
    assert first is None and 2 * MEBIBYTE - HEAD <= second < 2 * MEBIBYTE
    assert 5 * MEBIBYTE - 2 * HEAD <= third < 5 * MEBIBYTE
    assert SIZE < sum(link.proxy.sent) < SIZE + 3 * HEAD, "nothing came twice"
    assert [file.name for file in link.left] == ["here"]


def test_many_breaks_are_no_reason_to_stop_while_there_is_progress(link):
    content = link.lora.read_bytes()
    each = MEBIBYTE + HEAD
    assert link.download([each] * 5 + [100] * 4) == content
    assert len(link.proxy.sent) == 10 > transfer.TRIES


def test_a_transfer_that_gets_nowhere_ends(link):
    with pytest.raises(BackendUnreachable, match=r"far_000800.safetensors does not arrive from http://127.*job is safe there"):
        link.download(itertools.repeat(5000))
    assert len(link.proxy.sent) == transfer.TRIES and link.left == []


def test_waits_grow(link, monkeypatch):
    waited, sleep = [], asyncio.sleep

    async def note(seconds):
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(transfer, "PAUSE", 0.5)
    monkeypatch.setattr(transfer.asyncio, "sleep", note)
    with pytest.raises(BackendUnreachable):
        link.download(itertools.repeat(100))
    assert [seconds for seconds in waited if seconds] == [0.5, 1, 2, 4]


@pytest.mark.parametrize("size", [SIZE, MEBIBYTE], ids=["as large", "smaller than what has come"])
def test_a_file_that_changes_meanwhile_is_brought_from_its_beginning(link, size):
    old, new = link.lora.read_bytes(), secrets.token_bytes(size)
    link.replace(new)
    artifact = link.artifact()
    link.replace(old)
    assert link.download([2 * MEBIBYTE], artifact, on_cut=lambda: link.replace(new)) == new
    # the question for the rest is answered with the whole new file, or refused, and then the whole is asked for
    whole = [start is None for start in link.ranges()]
    assert whole in ([True, False], [True, False, True])


def test_what_is_not_as_announced_is_not_kept(link):
    """Whole and of the right length, but other bytes, every time: no endless loop, and no file."""
    artifact = link.artifact() | {"sha256": hashlib.sha256(b"something else").hexdigest()}
    with pytest.raises(BackendUnreachable, match="arrived damaged, or has changed meanwhile"):
        link.download([], artifact)
    assert link.left == [] and set(link.ranges()) == {None}


def test_a_file_that_is_removed_meanwhile_ends_the_transfer(link):
    with pytest.raises(BackendError) as caught:
        link.download([MEBIBYTE], on_cut=link.lora.unlink)
    assert caught.value.kind == "UnknownFile" and link.left == []


def test_sheets_which_have_no_ranges_begin_again(link):
    sheet = link.server.run_folder(link.job["id"]) / "samples" / "iteration_000800.png"
    sheet.write_bytes(secrets.token_bytes(MEBIBYTE))
    assert link.download([MEBIBYTE // 2], link.artifact("samples", sheet.name)) == sheet.read_bytes()
    assert link.ranges()[1] is not None
    assert len(link.proxy.sent) == 2


def test_a_folder_that_cannot_be_written_is_named(link, tmp_path):
    link.destination = tmp_path / "file"
    link.destination.write_text("")
    with pytest.raises(StorageError, match="cannot write .*here: .*"):
        link.download([])
