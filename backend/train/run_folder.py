"""The folder of one run: its job, its events, its checkpoints, its LoRAs.

``spec.json`` is the job; ``start.safetensors`` the LoRA it starts from, if it names one; ``events.jsonl`` only grows, and
every line carries the attempt that wrote it; ``checkpoints/`` holds pairs of a safetensors file and the JSON that, written
last, declares it complete; ``lora/`` what graphs load;
``control``, while it is there, asks the run to pause or to end.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from filelock import FileLock, Timeout

from ..errors import MixGRPOError
from ..files import StorageError, load_json, load_tensors, remove_leftovers, save_json, save_tensors, sha256_of, write_atomically
from ..specs import TrainSpec
from ..specs.job import parse_job
from .history import History

if TYPE_CHECKING:
    import torch

Request = Literal["pause", "cancel"]
"""What a run can be asked while it trains."""
_PATIENCE = 5.0


class RunError(MixGRPOError):
    """A run folder that cannot be used as asked."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that training to ``iteration`` left behind, as whole (unsharded) tensors."""

    iteration: int
    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    layout: dict[str, Any]
    ema: dict[str, torch.Tensor] | None = None

    def exported(self, weights: str) -> dict[str, torch.Tensor]:
        """What a LoRA file is made of: the moving average for "ema", else the trained adapter."""
        return self.adapter if weights == "raw" or self.ema is None else self.ema


class RunFolder:
    """Reads and writes one run. Only the first rank writes.

    Attributes:
        history: what counts of the events, once :meth:`open` has read them.
    """

    def __init__(self, path: Path):
        self.path = Path(path).absolute()
        self.history = History()
        self.attempt = 1
        self._wanted = self.path / "wanted.json"
        self._lock = FileLock(self.path / ".lock")
        self._control = self.path / "control"
        self._start = self.path / "start.safetensors"

    def lora_file(self, name: str, iteration: int) -> Path:
        """Where the LoRA of an iteration is; a new name for every checkpoint, since ComfyUI caches LoRAs by name."""
        return self.path / "lora" / f"{name}_{iteration:06d}.safetensors"

    def lora_iterations(self) -> set[int]:
        """The iterations there is a LoRA of, under whatever name."""
        digits = (file.stem[-6:] for file in (self.path / "lora").glob("*_??????.safetensors"))
        return {int(iteration) for iteration in digits if iteration.isdecimal()}

    def want(self, iteration: int) -> None:
        """Note that somebody waits for the LoRA of an iteration: it is saved when it is trained, and :meth:`retain` keeps it."""
        with self._deciding():
            wanted = self.wanted()
            if iteration not in wanted:
                save_json(self._wanted, sorted(wanted | {iteration}))

    def wanted(self) -> set[int]:
        """The iterations that somebody has waited for."""
        return set(load_json(self._wanted)) if self._wanted.exists() else set()

    def retain(self, keep: Callable[[set[int], set[int]], set[int]]) -> set[int]:
        """Remove the LoRAs that need not stay, with their sheets, and return their iterations.

        A file that somebody reads stays readable for them; where the system refuses to remove it then (Windows), it goes with a
        later one.

        Args:
            keep: called with the iterations there is a LoRA of and those that are wanted; returns the iterations to keep.
        """
        removed = set()
        with self._deciding():
            loras = self.lora_iterations()
            for iteration in loras - keep(loras, self.wanted()):
                files = [*(self.path / "lora").glob(f"*_{iteration:06d}.safetensors"), self._sheet(iteration)]
                try:
                    for file in files:
                        file.unlink(missing_ok=True)
                except PermissionError:
                    continue
                removed.add(iteration)
        return removed

    def forget_sheets(self, iteration: int) -> None:
        """Remove the sheets beyond an iteration: they show what an attempt drew that no longer counts."""
        for file in (self.path / "samples").glob("iteration_??????.png"):
            if not file.stem[-6:].isdecimal() or int(file.stem[-6:]) <= iteration:
                continue
            try:
                file.unlink(missing_ok=True)
            except PermissionError:  # Windows, while somebody reads it: it goes with the next sheet
                continue

    def _sheet(self, iteration: int) -> Path:
        return self.path / "samples" / f"iteration_{iteration:06d}.png"

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """One process at a time says or asks what is wanted, so that nothing is removed that somebody has just asked for."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path / ".wanted.lock", timeout=_PATIENCE):
                yield
        except Timeout:
            raise RunError(
                f"{self.path / '.wanted.lock'} has been held for {_PATIENCE:g} seconds; end the process that stands still there"
            ) from None

    def lock(self) -> None:
        """Own the run until the process ends; raises :class:`RunError` when another process does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise RunError(f"{self.path} is in use by another process; wait for it, stop it, or choose another folder") from None
        except OSError as error:
            raise StorageError(f"cannot use {self.path} as a run folder: {error}; choose another folder") from error

    def unlock(self) -> None:
        """Let another process have the run."""
        self._lock.release()

    def open(self, spec: TrainSpec) -> TrainSpec:
        """Write the job, or check it against the one this folder was begun for; a larger ``iterations`` continues.

        A job that never got as far as its first iteration (a misspelt scorer, say) may still be changed.

        Raises:
            RunError: a field that determines the numbers is another than the folder's; the message names every one.
        """
        remove_leftovers(self.path)
        self.history = self.read_history()
        file, begun = self.path / "spec.json", bool(self.history.last or self._checkpoint_markers())
        if file.exists() and begun:
            stored = parse_job(load_json(file))
            changed = _differences(stored.identity_fields(), spec.identity_fields())
            if changed:
                raise RunError(
                    f"{self.path} belongs to another job: {'; '.join(changed)}. Choose another folder for the changed job, or "
                    "change the job back to continue this run"
                )
        save_json(file, spec.model_dump(mode="json"))
        self.attempt = 1 + self.history.attempts
        return spec

    def put_start(self, source: Path, digest: str) -> None:
        """Copy the LoRA that training starts from into the folder, unless it is there.

        Raises:
            RunError: ``source`` is not the file whose SHA-256 is ``digest``.
            StorageError: it cannot be read or written.
        """
        if self._start.is_file() and sha256_of(self._start) == digest:
            return

        def copy(temporary: Path) -> None:
            shutil.copyfile(source, temporary)
            _require_digest(temporary, digest, str(source))

        write_atomically(self._start, copy)

    def start_file(self, digest: str) -> Path:
        """The LoRA that training starts from; raises :class:`RunError` when it is missing or not the one of that SHA-256."""
        if not self._start.is_file():
            raise RunError(
                f"{self._start} is missing, the LoRA that the job starts from (lora.start_from {digest[:12]}); name the file "
                "with --start-from"
            )
        _require_digest(self._start, digest, str(self._start))
        return self._start

    def request(self, what: Request) -> None:
        """Ask whoever trains here to stop, through a file that it reads between its phases; the latest request counts."""
        write_atomically(self._control, lambda temporary: temporary.write_text(what, encoding="ascii"))

    def requested(self) -> Request | None:
        """What this run was asked, if anything."""
        try:
            word = self._control.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        return word if word in get_args(Request) else None

    def withdraw_request(self) -> None:
        """Forget what was asked: it has been done, or the run begins anew."""
        self._control.unlink(missing_ok=True)

    def events(self) -> list[dict[str, Any]]:
        """All events ever written, of all attempts, in order; a last line cut short by a kill is passed over."""
        file = self.path / "events.jsonl"
        if not file.exists():
            return []
        lines = file.read_text(encoding="utf-8").splitlines()
        complete = []
        for number, line in enumerate(lines, 1):
            try:
                complete.append(json.loads(line))
            except ValueError as error:
                if number < len(lines) and not line.startswith("{"):
                    raise StorageError(f"{file} line {number} is not an event ({error}); move the file away") from error
        return complete

    def read_history(self) -> History:
        """What counts of all events so far."""
        history = History()
        for event in self.events():
            history.take(event)
        return history

    def iterations(self) -> list[dict[str, Any]]:
        """The iteration events that count: of an iteration done twice, the last attempt's."""
        return self.read_history().iterations

    def append(self, event: str, **fields: Any) -> None:
        """Add one event; raises :class:`StorageError` when it cannot be written."""
        row = {"event": event, "attempt": self.attempt, "time": round(time.time(), 3), **fields}
        line = json.dumps(row, allow_nan=False)
        try:
            with open(self.path / "events.jsonl", "a+", encoding="utf-8") as file:
                file.write(("" if _ends_with_newline(file) else "\n") + line + "\n")
        except OSError as error:
            raise StorageError(f"cannot append to {self.path / 'events.jsonl'}: {error}; checkpoints are safe") from error
        self.history.take(row)

    def save_checkpoint(self, checkpoint: Checkpoint, identity: str, base_model: str, keep: int) -> None:
        """Write a checkpoint; only when it is complete are all but the newest ``keep`` removed.

        Args:
            identity: of the job, which a continuation must have.
            base_model: hash of the weights it was trained on, likewise.
        """
        tensors = {f"adapter.{name}": value for name, value in checkpoint.adapter.items()}
        tensors |= {f"optimizer.{name}": value for name, value in checkpoint.optimizer.items()}
        tensors |= {f"ema.{name}": value for name, value in (checkpoint.ema or {}).items()}
        file = self._checkpoint_file(checkpoint.iteration)
        save_tensors(file, tensors)
        facts = {
            "iteration": checkpoint.iteration,
            "identity": identity,
            "base_model": base_model,
            "sha256": sha256_of(file),
            "layout": checkpoint.layout,
        }
        save_json(file.with_suffix(".json"), facts)
        self._remove_checkpoints(keep)

    def load_checkpoint(self, identity: str, base_model: str) -> Checkpoint | None:
        """The newest complete checkpoint, or None.

        Raises:
            RunError: it is damaged, of another job, or of another base model.
        """
        markers = self._checkpoint_markers()
        if not markers:
            return None
        marker = markers[-1]
        try:
            facts, tensors = _read_checkpoint(marker)
        except (MixGRPOError, OSError) as error:
            earlier = f"to continue from {markers[-2].stem}" if len(markers) > 1 else "to start again from the beginning"
            raise RunError(
                f"the checkpoint {marker.with_suffix('.safetensors')} is damaged or incomplete ({error}); delete it and "
                f"{marker.name} {earlier}"
            ) from error
        if facts["identity"] != identity:
            raise RunError(f"{marker} is a checkpoint of another job; choose another folder for this one")
        if facts["base_model"] != base_model:
            raise RunError(
                f"{marker} was trained on other weights of the base model ({facts['base_model'][:12]}, now {base_model[:12]}); "
                "put those back, or choose another folder"
            )
        parts = {
            part: {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}
            for part in ("adapter", "optimizer", "ema")
        }
        return Checkpoint(facts["iteration"], parts["adapter"], parts["optimizer"], facts["layout"], parts["ema"] or None)

    def _remove_checkpoints(self, keep: int) -> None:
        """Remove all but the newest, each one's marker first, and tensors whose marker a kill has prevented or removed."""
        kept = {marker.stem for marker in self._checkpoint_markers()[-keep:]}
        try:
            for suffix in ("json", "safetensors"):
                for file in (self.path / "checkpoints").glob(f"iteration_*.{suffix}"):
                    if file.stem not in kept:
                        file.unlink()
        except OSError as error:
            raise StorageError(f"cannot remove an old checkpoint: {error}; the new one is safe, start the run again") from error

    def _checkpoint_file(self, iteration: int) -> Path:
        return self.path / "checkpoints" / f"iteration_{iteration:06d}.safetensors"

    def _checkpoint_markers(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("iteration_*.json"))


def _read_checkpoint(marker: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a marker says and the tensors it declares complete; raises an error for anything else."""
    facts, file = load_json(marker), marker.with_suffix(".safetensors")
    if not isinstance(facts, dict) or not {"iteration", "identity", "base_model", "sha256", "layout"} <= facts.keys():
        raise StorageError(f"{marker.name} does not describe a checkpoint")
    if sha256_of(file) != facts["sha256"]:
        raise StorageError(f"{file.name} is not the file that {marker.name} describes")
    return facts, load_tensors(file)


def _ends_with_newline(file: Any) -> bool:
    """Whether the last line of a text file opened for appending is complete (an empty file is)."""
    if file.seek(0, 2) == 0:
        return True
    with open(file.name, "rb") as raw:
        raw.seek(-1, 2)
        return raw.read(1) == b"\n"


def _require_digest(file: Path, digest: str, origin: str) -> None:
    found = sha256_of(file)
    if found != digest:
        raise RunError(
            f"{origin} is not the LoRA that the job starts from: its SHA-256 is {found[:12]}…, lora.start_from says "
            f"{digest[:12]}…; name the right file with --start-from, or correct lora.start_from"
        )


def _differences(old: Any, new: Any, field: str = "") -> list[str]:
    """Every leaf that differs, as 'field: old -> new'."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(set(old) | set(new))
        return [line for key in keys for line in _differences(old.get(key), new.get(key), f"{field}.{key}".lstrip("."))]
    return [] if old == new else [f"{field} was {_short(old)} and is now {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
