"""GRPO Train Step: a training job inside a graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui

from ..backend.settings import LOCAL
from ..backend.specs import TrainSpec
from ..backend.specs.job import parse_job
from .artifacts import as_image, fetch_lora, load_lora, lora_name, newest_sheet, written
from .checks import GraphError
from .training import Order, train, unless_interrupted
from .types import CATEGORY, LoraSettings, ModelReference, OptimizerSettings, Rewards, Sampling

BASE_MODEL = "base model"
_DEFAULT = {name: field.default for name, field in TrainSpec.model_fields.items()}


class TrainStep(io.ComfyNode):
    """Trains to iteration N: the same N again gives the finished LoRA at once, a larger one continues."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_TrainStep",
            display_name="GRPO Train Step",
            category=CATEGORY,
            description="Trains a LoRA towards the rewards, in a backend process. The same settings never train twice; a larger "
            "number of iterations continues.",
            is_output_node=True,
            inputs=[*_sockets(), *_widgets(), *_optional_sockets()],
            outputs=[
                io.LoraModel.Output("lora", display_name="LORA_MODEL", tooltip="For ComfyUI's node Load LoRA Model."),
                io.String.Output(
                    "lora_name", display_name="lora_name",
                    tooltip="Its file among ComfyUI's LoRAs; empty while there is none yet (with wait off).",
                ),
                io.String.Output("metrics", display_name="metrics", tooltip="Iterations, rewards and seconds, as JSON."),
                io.Image.Output("samples", display_name="samples", tooltip="The newest pictures with their advantages."),
            ],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, wait=None, start_from=None, **others) -> float | str:
        """A job that is not waited for has got further since, so the node runs again; else its settings and one file tell all."""
        if wait is not True or start_from is None:
            return float("nan")
        file = starting_lora(start_from)
        return "" if file is None else f"{file} {file.stat().st_mtime_ns} {file.stat().st_size}"

    @classmethod
    async def execute(
        cls, model_ref, rewards, sampling, prompts, negative_prompt, name, iterations, group_size, prompts_per_iteration,
        seed, start_from, checkpoint_every, wait, unload_models, backend, lora_settings=None, optimizer=None, monitors=(),
    ) -> io.NodeOutput:  # fmt: skip
        fields = {
            "model": model_ref,
            "rewards": rewards,
            "sampling": sampling,
            "lora": lora_settings,
            "optimizer": optimizer,
            "monitors": monitors,
            "prompts": lines(prompts),
            "negative_prompt": negative_prompt,
            "name": name,
            "iterations": iterations,
            "group_size": group_size,
            "prompts_per_iteration": prompts_per_iteration,
            "seed": seed,
            "checkpoint_every": checkpoint_every,
        }
        spec = parse_job({field: value for field, value in fields.items() if value is not None})
        order = Order(spec, backend.strip() or LOCAL, starting_lora(start_from), wait, unload_models)
        return await unless_interrupted(_run(order, start_from))


def _sockets() -> list[io.Input]:
    return [
        ModelReference.Input("model_ref", tooltip="The base model to train; patches on a MODEL never travel to the trainer."),
        Rewards.Input("rewards", tooltip="What is wanted: one reward or a chain of them."),
        Sampling.Input("sampling", tooltip="How pictures are drawn while training."),
    ]


def _widgets() -> list[io.Input]:
    import folder_paths

    return [
        io.String.Input("prompts", multiline=True, default="", tooltip="What to train on, one prompt a line."),
        io.String.Input("negative_prompt", multiline=True, default="", tooltip="Steered away from when cfg is not 1."),
        io.String.Input("name", default="mixgrpo", tooltip="Begins the names of the LoRA files: letters, digits, _ and -."),
        io.Int.Input(
            "iterations", default=_DEFAULT["iterations"], min=1, max=999_999,
            tooltip="Train to this iteration. The same number again trains nothing; a larger one continues.",
        ),
        io.Int.Input(
            "group_size", default=_DEFAULT["group_size"], min=2, max=4096,
            tooltip="Samples per prompt, which the rewards compare with each other.",
        ),
        io.Int.Input(
            "prompts_per_iteration", default=_DEFAULT["prompts_per_iteration"], min=1, max=999_999,
            tooltip="Prompts per iteration; all of them come up in shuffled rounds.",
        ),
        io.Int.Input(
            "seed", default=0, min=0, max=2**63 - 1, control_after_generate=False,
            tooltip="Noise, order of the prompts and the adapter's beginning.",
        ),
        io.Combo.Input(
            "start_from", options=[BASE_MODEL, *folder_paths.get_filename_list("loras")], default=BASE_MODEL,
            tooltip="A LoRA to go on from instead of the base model; its rank, alpha and layers must be those of LoRA Settings.",
        ),
        io.Int.Input(
            "checkpoint_every", default=_DEFAULT["checkpoint_every"], min=1, max=999_999,
            tooltip="Iterations between two checkpoints, each with a LoRA. Changes no number of the training.",
        ),
        io.Boolean.Input(
            "wait", default=True,
            tooltip="On: the graph waits for the finished LoRA. Off: it goes on with the newest LoRA; the job trains alone.",
        ),
        io.Boolean.Input(
            "unload_models", default=True,
            tooltip="Free the memory of ComfyUI's models before a job on this machine; they load again when they are needed.",
        ),
        io.String.Input("backend", default=LOCAL, tooltip="local, or the name of a backend in your backends.yaml."),
    ]  # fmt: skip


def _optional_sockets() -> list[io.Input]:
    return [
        LoraSettings.Input("lora_settings", optional=True, tooltip="Rank, alpha and layers of the LoRA."),
        OptimizerSettings.Input("optimizer", optional=True, tooltip="Learning rate, clipping, updates per rollout."),
        Rewards.Input("monitors", optional=True, tooltip="Scorers that only watch: nothing is learnt from them."),
    ]


def lines(text: str) -> list[str]:
    """One prompt a line; raises :class:`GraphError` when there is none."""
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise GraphError("there is no prompt to train on; write one prompt a line")
    return prompts


def starting_lora(name: str) -> Path | None:
    """The file of a LoRA in ComfyUI's list; None for the base model.

    Raises:
        GraphError: ComfyUI does not list it (a workflow is a stranger's file: it names no paths).
    """
    import folder_paths

    if name == BASE_MODEL:
        return None
    if name not in folder_paths.get_filename_list("loras"):
        raise GraphError(
            f"start_from: there is no LoRA {name[:200]!r} in ComfyUI's list; put it into models/loras, or choose another"
        )
    return Path(folder_paths.get_full_path_or_raise("loras", name))


async def _run(order: Order, started_from: str) -> io.NodeOutput:
    backend, job = await train(order)
    summary = await backend.summary(job["id"])
    iteration = order.spec.iterations if order.wait else max(summary["loras"], default=0)
    lora, name = {}, ""
    if iteration:
        file = await fetch_lora(backend, summary, iteration)
        lora, name = load_lora(file), lora_name(file)
    elif order.start_from is not None:
        lora, name = load_lora(order.start_from), started_from
    sheet = await newest_sheet(backend, job["id"], iteration or None)
    samples = as_image(sheet[1] if sheet else written(f"job {job['id']} ({summary['state']}): no pictures yet"))
    shown = _summary(order.backend, summary, name, iteration)
    return io.NodeOutput(
        lora, name, json.dumps(shown, indent=1), samples, ui={"mixgrpo_train": [shown], **ui.PreviewImage(samples).as_dict()}
    )


def _summary(backend: str, job: dict[str, Any], name: str, iteration: int) -> dict[str, Any]:
    """What ``/history`` keeps of the node, and its panel shows."""
    fields = ("id", "name", "state", "iteration", "iterations", "best", "seconds", "curve")
    rewards = [reward for reward in job["curve"]["reward"] if reward is not None]
    return {"backend": backend, "job": job["id"]} | {field: job[field] for field in fields[1:]} | {
        "reward": rewards[-1] if rewards else None,
        "lora": name,
        "lora_iteration": iteration,
    }  # fmt: skip
