"""The files of the base models, without PyTorch: the server compares them with what a run was trained on."""

from __future__ import annotations

from pathlib import Path

from ..files import known_sha256, load_json, save_json, sha256_of
from ..specs import ModelSpec

STARTER = Path(__file__).resolve().parents[1] / "starter" / "weights"
TRANSFORMER_FILES = {"starter": STARTER / "transformer" / "diffusion_pytorch_model.safetensors"}
"""By model family, the file whose bytes a run and its LoRAs belong to."""


def base_model_hash(spec: ModelSpec) -> str:
    """SHA-256 of the transformer's file, so that a run and its LoRAs name the bytes they belong to.

    Raises:
        StorageError: the file cannot be read.
    """
    return known_sha256(TRANSFORMER_FILES[spec.family])


def write_manifest(folder: Path = STARTER) -> None:
    """Record in ``sha256.json`` the bytes of the starter's tensor files (other files may have another system's line ends)."""
    files = sorted(folder.rglob("*.safetensors"))
    save_json(folder / "sha256.json", {file.relative_to(folder).as_posix(): sha256_of(file) for file in files})


def damaged_files(folder: Path = STARTER) -> tuple[list[str], list[str]]:
    """The starter's tensor files that are missing, and those with other bytes than were published, by their names there.

    Raises:
        StorageError: the manifest is not there or cannot be read.
    """
    published: dict[str, str] = load_json(folder / "sha256.json")
    missing = [name for name in published if not (folder / name).is_file()]
    return missing, [name for name in published if name not in missing and sha256_of(folder / name) != published[name]]
