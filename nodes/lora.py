"""Load MixGRPO LoRA: what a job has made, by the job's id or name."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..backend.client import Backend, BackendError, BackendUnreachable, connect
from ..backend.settings import LOCAL
from .artifacts import LoraError, apply_lora, fetch_lora, load_lora, lora_name
from .training import unless_interrupted
from .types import CATEGORY

WHICH = ("latest", "best", "iteration")


class LoadLora(io.ComfyNode):
    """A job's LoRA on a MODEL; runs again when the job has a newer one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_LoadLora",
            display_name="Load MixGRPO LoRA",
            category=CATEGORY,
            description="Applies the LoRA of a training job: the latest, the best, or that of an iteration.",
            inputs=[
                io.Model.Input("model", tooltip="A MODEL of the family that the job trains."),
                io.String.Input("job", default="", tooltip="The job's id or its name; of several with a name the newest counts."),
                io.Combo.Input(
                    "which", options=list(WHICH), default=WHICH[0],
                    tooltip="latest: the newest LoRA. best: the one with the highest mean reward. iteration: the one below.",
                ),
                io.Int.Input("iteration", default=0, min=0, max=999_999, tooltip="For 'iteration' only; 0 is the base model."),
                io.Float.Input(
                    "strength", default=1.0, min=-100.0, max=100.0, step=0.01, tooltip="1 is what was trained, 0 the base model."
                ),
                io.String.Input("backend", default=LOCAL, tooltip="local, or the name of a backend in your backends.yaml."),
            ],
            outputs=[
                io.Model.Output("patched", display_name="MODEL", tooltip="The MODEL with the LoRA."),
                io.LoraModel.Output("lora", display_name="LORA_MODEL", tooltip="The LoRA, for ComfyUI's node Load LoRA Model."),
                io.String.Output("lora_name", display_name="lora_name", tooltip="Its file among ComfyUI's LoRAs."),
            ],
        )  # fmt: skip

    @classmethod
    async def fingerprint_inputs(cls, job=None, which=None, iteration=None, backend=None, **others) -> Any:
        """The job and the iteration that would be loaded; not asked of a backend that would have to be started for it."""
        if None in (job, which, iteration, backend):
            return float("nan")
        try:
            found, chosen = await _choose(await connect(backend.strip() or LOCAL, start=False), job, which, iteration)
        except (BackendUnreachable, BackendError, LoraError):
            return float("nan")
        return f"{found['id']} {chosen}"

    @classmethod
    async def execute(cls, model, job, which, iteration, strength, backend) -> io.NodeOutput:
        lora, name = await unless_interrupted(_load(backend.strip() or LOCAL, job, which, iteration))
        patched = apply_lora(model, lora, strength, name) if lora and strength else model
        return io.NodeOutput(patched, lora, name, ui={"mixgrpo_lora": [{"lora": name, "layers": len(lora) // 3}]})


async def _load(alias: str, job: str, which: str, iteration: int) -> tuple[dict[str, Any], str]:
    backend = await connect(alias)
    found, chosen = await _choose(backend, job, which, iteration)
    if chosen == 0:
        return {}, ""
    file = await fetch_lora(backend, found, chosen)
    return load_lora(file), lora_name(file)


async def _choose(backend: Backend, job: str, which: str, iteration: int) -> tuple[dict[str, Any], int]:
    """The job and the iteration of the LoRA that is meant."""
    jobs, wanted = await backend.jobs(), job.strip()
    found = next((entry for entry in jobs if wanted in (entry["id"], entry["name"])), None)
    if found is None:
        known = ", ".join(f"{entry['name']} ({entry['id']})" for entry in jobs[:5]) or "none yet"
        raise LoraError(f"there is no job {wanted[:64]!r} on this backend; the newest are: {known}")
    if which not in WHICH:
        raise LoraError(f"'which' may be {', '.join(WHICH)} (given: {which!r})")
    if which == "iteration":
        return found, iteration
    chosen = max(found["loras"], default=None) if which == "latest" else (await backend.summary(found["id"]))["best"]
    if chosen is None:
        raise LoraError(f"job {found['id']} has no LoRA yet; it is {found['state']} at iteration {found['iteration']}")
    return found, chosen
