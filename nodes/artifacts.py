"""What a job has made, brought to where graphs find it: LoRAs among ComfyUI's own, sample sheets as pictures."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..backend.client import Backend, BackendError
from ..backend.errors import MixGRPOError

_FOLDER = "mixgrpo"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ID = re.compile(r"[0-9a-f]{16}")


class LoraError(MixGRPOError):
    """A LoRA that a job does not have, or that does not fit the MODEL."""


async def fetch_lora(backend: Backend, job: dict[str, Any], iteration: int) -> Path:
    """Bring a job's LoRA into ``output/loras/mixgrpo``, where ComfyUI lists it, under a name that is never used for another.

    ComfyUI keeps LoRAs by name once they are loaded, so a file is never overwritten.

    Raises:
        LoraError: the job has no LoRA of that iteration.
    """
    import folder_paths

    artifact = _artifact(await backend.artifacts(job["id"]), "lora", iteration)
    if artifact is None:
        known = ", ".join(map(str, job["loras"])) or "none yet"
        raise LoraError(f"job {job['id']} has no LoRA of iteration {iteration}; there are: {known}")
    if not _NAME.fullmatch(job["name"]) or not _ID.fullmatch(job["id"]):
        raise LoraError(f"the backend names a job {job['name'][:64]!r}, which cannot name a file; use a backend of this version")
    folder = Path(folder_paths.get_output_directory()) / "loras" / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{job['name']}_{job['id'][:8]}_{iteration:06d}"
    for file in (folder / f"{stem}.safetensors", folder / f"{stem}_{artifact['sha256'][:8]}.safetensors"):
        if not file.exists():
            return await backend.download(job["id"], artifact, file)
        if _digest(file) == artifact["sha256"]:
            return file
    raise LoraError(f"{file} exists with other content; move it away")


def lora_name(file: Path) -> str:
    """The name under which ComfyUI lists a file that :func:`fetch_lora` brought."""
    return os.path.join(_FOLDER, file.name)


def load_lora(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA file, as ComfyUI's own loader reads them."""
    import comfy.utils

    return comfy.utils.load_torch_file(str(file), safe_load=True)


def apply_lora(model: Any, lora: dict[str, torch.Tensor], strength: float, name: str) -> Any:
    """A clone of MODEL with every tensor of the LoRA bound; ComfyUI itself only logs what it cannot bind.

    Raises:
        LoraError: the LoRA is of another family; the message has the number of layers that fit.
    """
    import comfy.lora

    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    layers = {_layer(key) for key in lora}
    patches = comfy.lora.load_lora({key: tensor for key, tensor in lora.items() if _layer(key) in keys}, keys)
    patched = model.clone()
    bound = patched.add_patches(patches, strength)
    if len(bound) < len(layers):
        kind = type(model.model).__name__
        raise LoraError(
            f"{len(bound)} of the {len(layers)} layers of the LoRA {name} exist in this MODEL ({kind}); connect the model family "
            "that it was trained on"
        )
    return patched


async def newest_sheet(backend: Backend, job_id: str, until: int | None = None) -> tuple[int, Image.Image] | None:
    """The newest sample sheet (of iteration ``until`` at the latest) and its iteration; None when there is none."""
    sheets = [artifact for artifact in await backend.artifacts(job_id) if artifact["kind"] == "samples"]
    sheets = [sheet for sheet in sheets if until is None or sheet["iteration"] <= until]
    if not sheets:
        return None
    newest = max(sheets, key=lambda sheet: sheet["iteration"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            file = await backend.download(job_id, newest, Path(folder) / "sheet.png")
        except BackendError as error:
            if error.kind == "UnknownFile":  # a later one has replaced it meanwhile
                return None
            raise
        with Image.open(file) as picture:
            return newest["iteration"], picture.convert("RGB")


def as_image(picture: Image.Image) -> torch.Tensor:
    """A picture as IMAGE, float32 (1, height, width, 3) in [0, 1]."""
    return torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.float32) / 255.0)[None]


def written(text: str, size: tuple[int, int] = (512, 64)) -> Image.Image:
    """A picture that says why there is none."""
    sheet = Image.new("RGB", size, (250, 250, 250))
    ImageDraw.Draw(sheet).text((16, size[1] // 2 - 8), text, fill=(40, 40, 40), font=ImageFont.load_default(14))
    return sheet


def _layer(key: str) -> str:
    """The layer that a tensor of a LoRA file belongs to."""
    return key.removesuffix(".alpha").rsplit(".lora_", 1)[0]


def _artifact(artifacts: list[dict[str, Any]], kind: str, iteration: int) -> dict[str, Any] | None:
    return next((entry for entry in artifacts if (entry["kind"], entry["iteration"]) == (kind, iteration)), None)


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
