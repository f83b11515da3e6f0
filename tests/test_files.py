"""Files: whole or not at all, and what is no safetensors file is refused."""

import hashlib
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import zipfile

import pytest
import torch

from mixgrpo.backend import files
from mixgrpo.backend.files import (
    StorageError,
    known_sha256,
    load_json,
    load_metadata,
    load_tensors,
    remove_leftovers,
    save_json,
    save_tensors,
    sha256_of,
    write_atomically,
)

posix = pytest.mark.skipif(os.name != "posix", reason="file modes and SIGKILL are POSIX")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_whole_and_alone(tmp_path):
    path = write_atomically(tmp_path / "new folder" / "a.bin", lambda temporary: temporary.write_bytes(b"whole"))
    assert path.read_bytes() == b"whole" and names(path.parent) == ["a.bin"]
    write_atomically(path, lambda temporary: temporary.write_bytes(b"other"))
    assert path.read_bytes() == b"other" and names(path.parent) == ["a.bin"]


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write(temporary):
        assert temporary.parent.parent == path.parent  # another folder may be another disk, and then a rename is a copy
        temporary.write_bytes(b"half")
        assert path.read_bytes() == b"old"

    write_atomically(path, write)
    assert path.read_bytes() == b"half"


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_writer_that_fails_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write(temporary):
        temporary.write_bytes(b"half")
        raise error

    with pytest.raises(StorageError if isinstance(error, OSError) else type(error)) as raised:
        write_atomically(path, write)
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.bin"]
    if isinstance(error, OSError):
        assert str(raised.value).startswith(f"cannot write {path}: the disk is gone; nothing saved before was changed")


def test_a_rename_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def refuse(source, target):
        raise PermissionError("in use by another program")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match="in use by another program"):
        write_atomically(path, lambda temporary: temporary.write_bytes(b"new"))
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.bin"]


def test_a_folder_that_is_a_file_is_an_error_in_words(tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(StorageError, match="cannot write .*folder"):
        save_json(tmp_path / "folder" / "a.json", {})
    assert (tmp_path / "folder").read_text() == "a file"


@posix
def test_others_may_read_what_their_umask_allows(tmp_path):
    """ComfyUI may run as another user than the trainer; a temporary file of Python's own would be for its owner alone."""
    old = os.umask(0o022)
    try:
        save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(1)})
        save_json(tmp_path / "a.json", {})
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names(tmp_path)] == [0o644, 0o644]


@posix
def test_a_kill_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    program = (
        "import os, signal, sys; from pathlib import Path; from mixgrpo.backend.files import write_atomically\n"
        "def write(temporary):\n"
        "    temporary.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1]), write)"
    )
    ended = subprocess.run([sys.executable, "-c", program, path], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old" and len(names(tmp_path)) == 2
    unfinished = tmp_path / "deeper" / ".b.bin.0123abcd.part"
    unfinished.mkdir(parents=True)
    (unfinished / ".tmpAbCdEf").write_bytes(b"half")
    (tmp_path / "mine.part").write_bytes(b"not ours")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["a.bin", "deeper", "mine.part"] and names(tmp_path / "deeper") == []


@pytest.mark.parametrize("left", [0, 4096])
def test_a_full_disk_is_an_error_in_words_and_changes_nothing(tiny_disk, left):
    tensors, other = {"x": torch.arange(10_000.0)}, {"x": torch.ones(10_000)}
    path = save_tensors(tiny_disk.folder / "a.safetensors", tensors)
    save_json(tiny_disk.folder / "a.json", {"kept": True})
    before = path.read_bytes()
    with tiny_disk.full(left):
        with pytest.raises(StorageError, match="cannot write .*a.safetensors: .*free some space or choose another folder"):
            save_tensors(path, other)
        with pytest.raises(StorageError, match="cannot write .*a.json: "):
            save_json(tiny_disk.folder / "a.json", {"text": "x" * 10_000})
    assert path.read_bytes() == before and load_json(tiny_disk.folder / "a.json") == {"kept": True}
    assert names(tiny_disk.folder) == ["a.json", "a.safetensors"]
    save_tensors(path, other)
    assert torch.equal(load_tensors(path)["x"], other["x"])


# ------------------------------------------------------------------ formats


def test_tensors_and_metadata_come_back_bit_for_bit(tmp_path):
    tensors = {
        "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "bfloat16": torch.tensor([1.0, float("nan"), float("-inf")], dtype=torch.bfloat16),
        "float64": torch.tensor([1 / 3], dtype=torch.float64),
        "transposed": torch.arange(6).view(2, 3).T,
        "empty": torch.zeros(0, 3),
        "trained": torch.nn.Parameter(torch.ones(2)),
    }
    path = save_tensors(tmp_path / "a.safetensors", tensors, {"who": "Müller", "what": "x"})
    again = load_tensors(path)
    assert again.keys() == tensors.keys() and load_metadata(path) == {"who": "Müller", "what": "x"}
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype and again[name].shape == tensor.shape
        assert torch.equal(again[name].contiguous().view(torch.uint8), tensor.detach().contiguous().view(torch.uint8))


def test_a_truncated_file_is_refused_at_every_length(tmp_path):
    whole = save_tensors(tmp_path / "a.safetensors", {"x": torch.arange(20.0), "y": torch.ones(3)}, {"a": "b"}).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(StorageError, match="is not a readable safetensors file"):
            load_tensors(cut)


def _pickle(path):
    path.write_bytes(pickle.dumps({"x": 1}))


def _old_torch(path):
    torch.save({"x": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def _zip(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x", "y")


@pytest.mark.parametrize("write", [_pickle, _old_torch, _zip, lambda path: torch.save({"x": torch.ones(2)}, path)])
def test_a_pickle_is_never_loaded(tmp_path, write):
    path = tmp_path / "a.safetensors"
    write(path)
    with pytest.raises(StorageError, match="pickle files .* are never loaded, convert them to safetensors first"):
        load_tensors(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "a.safetensors", tmp_path):
        with pytest.raises(StorageError, match="does not exist; check the name"):
            load_tensors(path)
    with pytest.raises(StorageError, match="cannot read .*a.json"):
        load_json(tmp_path / "a.json")
    with pytest.raises(StorageError, match="is not a readable safetensors file"):
        load_metadata(tmp_path / "a.safetensors")


def test_json_is_for_people_and_refuses_what_json_cannot_hold(tmp_path):
    path = save_json(tmp_path / "a.json", {"name": "größer", "numbers": [1, 2.5, None]})
    assert json.loads(path.read_text(encoding="utf-8")) == load_json(path) and "größer" in path.read_text(encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        save_json(path, {"loss": float("nan")})
    assert path.read_bytes() == before
    path.write_bytes(b'{"half":')
    with pytest.raises(StorageError, match="cannot read .*a.json"):
        load_json(path)


def test_a_known_checksum_is_computed_again_when_the_file_changes(tmp_path, monkeypatch):
    file, read = tmp_path / "weights", []
    monkeypatch.setattr(files, "sha256_of", lambda path: read.append(path) or sha256_of(path))
    for content in (b"one", b"three", b"four!"):
        file.write_bytes(content)
        os.utime(file, ns=(0, len(read)))  # a coarse clock must not decide this test
        for _ in range(3):
            assert known_sha256(file) == hashlib.sha256(content).hexdigest()
    assert read == [file] * 3
    file.unlink()
    with pytest.raises(StorageError, match="cannot read .*weights: No such file"):
        known_sha256(file)
