"""Run folders as the server sees them: it reads events, LoRAs and samples, and never leaves the folder."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import MixGRPOError
from ..files import StorageError, known_sha256, load_json
from ..train.history import History
from .store import UnknownJob

_JOB_ID = re.compile(r"[0-9a-f]{16}")
_FILES = {
    "lora": re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*_(\d{6})\.safetensors"),
    "samples": re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*_(\d{6})\.png"),
    "fixed": re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*_(\d{6})\.png"),
}
_MEBIBYTE = 2**20


class UnknownFile(MixGRPOError):
    """A run has no such artifact."""


def job_id(text: str) -> str:
    """The id itself if it can be one; raises :class:`UnknownJob` for anything else, so that it is safe as a folder's name."""
    if not _JOB_ID.fullmatch(text):
        raise UnknownJob(f"{text[:64]!r} is no job's id; an id has 16 hexadecimal digits")
    return text


@dataclass(frozen=True)
class Artifact:
    """A file that a run offers."""

    kind: str
    name: str
    iteration: int
    size: int
    sha256: str


class Run:
    """What one run folder holds. Event lines already read are kept, since the file only grows."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.history = History()

    # ------------------------------------------------------------------ events

    def events_after(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Whole events from a byte offset of the log on (at most about a mebibyte), and the offset to ask from next."""
        try:
            with open(self.path / "events.jsonl", "rb") as file:
                file.seek(offset)
                text = file.read(_MEBIBYTE)
        except FileNotFoundError:
            return [], offset
        whole = text[: text.rfind(b"\n") + 1]
        events = [event for event in map(_event, whole.splitlines()) if event is not None]
        return events, offset + len(whole)

    def refresh(self) -> None:
        """Read the events that came since the last call."""
        while True:
            events, offset = self.events_after(self.offset)
            if offset == self.offset:
                return
            self.offset = offset
            for event in events:
                self.history.take(event)

    def summary(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The run so far: a curve (mixed reward and mean scores by iteration), seconds, the best LoRA's iteration."""
        weights = {reward["scorer"]: reward["weight"] for reward in spec["rewards"]}
        rows = self.history.iterations
        curve = {
            "iteration": [row["iteration"] for row in rows],
            "reward": list(self.history.rewards(weights).values()),
            "scores": {name: [row["scores"][name]["mean"] for row in rows] for name in (rows[0]["scores"] if rows else {})},
        }
        return {
            "curve": curve,
            "seconds": round(sum(sum(row["seconds"].values()) for row in rows), 3),
            "seconds_left": rows[-1]["seconds_left"] if rows else None,
            "best": self.history.best(self.loras(), weights),
        }

    # ------------------------------------------------------------------ files

    def loras(self) -> dict[int, Path]:
        """The LoRA files by iteration; of two names for one iteration, which hold the same numbers, the first."""
        return {number: file for number, file in reversed(self._listed("lora"))}

    def reached(self) -> int:
        """The iteration of the newest complete checkpoint."""
        markers = sorted((self.path / "checkpoints").glob("iteration_*.json"))
        return int(markers[-1].stem.removeprefix("iteration_")) if markers else 0

    def base_model(self) -> str | None:
        """Hash of the base weights that the newest checkpoint was trained on; None without one that says so."""
        markers = sorted((self.path / "checkpoints").glob("iteration_*.json"))
        try:
            facts = load_json(markers[-1]) if markers else None
        except StorageError:  # removed for a newer one, or damaged, which the worker says in full
            return None
        return facts.get("base_model") if isinstance(facts, dict) else None

    def artifacts(self) -> list[dict[str, Any]]:
        """All files on offer, with their checksums (computed once per file)."""
        listed = [(kind, iteration, file) for kind in _FILES for iteration, file in self._listed(kind)]
        artifacts = []
        for kind, iteration, file in listed:
            try:
                artifacts.append(asdict(Artifact(kind, file.name, iteration, file.stat().st_size, known_sha256(file))))
            except (FileNotFoundError, StorageError):
                if file.exists():
                    raise
                # a sheet that has meanwhile given way to a newer one
        return artifacts

    def file(self, kind: str, name: str) -> Path:
        """A file on offer by kind and name; raises :class:`UnknownFile` for anything that is not one of them."""
        pattern = _FILES.get(kind)
        if pattern is None or not pattern.fullmatch(name):
            raise UnknownFile(f"{kind[:32]}/{name[:96]} is no artifact's name; ask for the job's artifacts to see all")
        file, folder = self.path / kind / name, (self.path / kind).resolve()
        if not file.is_file() or file.resolve().parent != folder or folder.parent != self.path.resolve():
            raise UnknownFile(f"the job has no {kind}/{name}; ask for the job's artifacts to see all")
        return file

    def sheet(self, name: str) -> bytes:
        """A sample sheet, read at once, since the worker may remove it at any time; raises :class:`UnknownFile`."""
        try:
            return self.file("samples", name).read_bytes()
        except FileNotFoundError:
            raise UnknownFile(f"the job has no samples/{name} any more; ask for the job's artifacts to see all") from None

    def _listed(self, kind: str) -> list[tuple[int, Path]]:
        folder = self.path / kind
        if not folder.is_dir():
            return []
        matches = ((_FILES[kind].fullmatch(file.name), file) for file in sorted(folder.iterdir()) if file.is_file())
        return sorted((int(match.group(1)), file) for match, file in matches if match)

    # ------------------------------------------------------------------ what the worker says

    @property
    def log(self) -> Path:
        """Where a worker's standard output and error go."""
        return self.path / "worker.log"

    def last_words(self, offset: int, lines: int = 20) -> list[str]:
        """The last lines in the log from a byte offset on; of a progress bar only its last state."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(offset, file.seek(0, 2) - 16384))
                text = file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        said = (line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))
        return [line[:1000] for line in said if line][-lines:]


def _event(line: bytes) -> dict[str, Any] | None:
    """A line that a kill has cut short is passed over, as the run folder itself does."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
