"""Compare Samplers: any number of samplers on one model, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from comfy_api.latest import io, ui
from PIL import Image
from torch import Tensor

from ..backend.flow.noise import initial_noise
from ..backend.flow.window import Window
from ..backend.lab.compare import OnStep, compare
from ..backend.lab.entries import Case, Entry, check_labels, check_memory
from ..backend.lab.results import conclude, fresh_folder
from ..backend.lab.scores import check_rewards
from ..backend.specs import RewardSpec
from .checks import Conditioning, GraphError, check_conditioning, check_flow
from .compare_entry import GraphEntry
from .sampling import GroupSettings, sample_groups
from .types import CATEGORY, CompareEntries, Rewards

_EULER = GroupSettings(1, False, 0.0, Window(0, 0))


class CompareSamplers(io.ComfyNode):
    """Every entry draws the same seeds from the same initial noise; the table says at what cost and how well."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_CompareSamplers",
            display_name="Compare Samplers",
            category=CATEGORY,
            is_output_node=True,
            description="Draws the same seeds with every sampler and puts pictures, cost and rewards side by side. The table is "
            "also kept as CSV and JSON in the output folder.",
            inputs=[*_sockets(), *_widgets(), *_rewarding()],
            outputs=[
                io.Image.Output(
                    "grid",
                    display_name="grid",
                    tooltip="A row for every seed, or every sample of a single seed; a column for every sampler.",
                ),
                io.Image.Output("images", display_name="images", tooltip="All pictures: sampler after sampler, seed after seed."),
                io.String.Output("table", display_name="table", tooltip="Settings and numbers as JSON."),
                io.Image.Output("chart", display_name="chart", tooltip="Quality against cost, and every number as bars."),
            ],
        )

    @classmethod
    def execute(
        cls, model, positive, negative, latent_image, vae, entries, seed, seeds, group_size, cfg, reference_steps, equal_nfe,
        rewards=None, prompt="",
    ) -> io.NodeOutput:  # fmt: skip
        rewards = tuple(rewards or ())
        check_flow(model.get_model_object("model_sampling"))
        check_labels([entry.label for entry in entries])
        for name, conditioning in (("positive", positive), ("negative", negative)):
            check_conditioning(name, conditioning, 1)
        latent = _one_latent(model, latent_image)
        cases = [Case(prompt.strip(), number % 2**64) for number in range(seed, seed + seeds)]
        if rewards:
            _check_prompt(rewards, prompt)
        built = [entry.built(model, latent) for entry in entries]
        check_memory(len(entries), seeds * group_size, _numbers_in_a_picture(vae, latent))

        progress = _Progress(model)
        given = _Graph(model, positive, negative, latent, latent_image.get("noise_mask"), cfg)
        host = GraphHost(given, entries, built, group_size, progress)
        results = compare(built, cases, host, reference_steps=reference_steps, equal_nfe=equal_nfe, on_step=progress.report)
        decoded = [_decoded(model, vae, result.latents) for result in results]
        settings = {
            "entries": [entry.settings for entry in entries],
            "seed": seed, "seeds": seeds, "group_size": group_size, "guidance": cfg, "latent": list(latent.shape[1:]),
            "reference_steps": reference_steps, "equal_nfe": equal_nfe, "prompt": prompt.strip(),
            "rewards": [reward.model_dump(mode="json") for reward in rewards],
        }  # fmt: skip
        comparison = conclude(settings, results, [_first_frames(shown) for shown in decoded], cases, rewards)
        comparison.save(fresh_folder(_output_folder()))
        progress.conclude(comparison.grid)
        grid = _as_image(comparison.grid)
        images = torch.cat([shown.flatten(0, 2) for shown in decoded])
        table = json.dumps(comparison.json, indent=1, ensure_ascii=False, allow_nan=False)
        shown = {"mixgrpo_compare": comparison.rows, **ui.PreviewImage(grid, cls=cls).as_dict()}
        return io.NodeOutput(grid, images, table, _as_image(comparison.chart), ui=shown)


def _sockets() -> list[io.Input]:
    return [
        io.Model.Input("model", tooltip="A flow-matching model: the starter, SD3, Flux, Qwen-Image, …"),
        io.Conditioning.Input("positive", tooltip="The prompt of all pictures."),
        io.Conditioning.Input("negative", tooltip="Steered away from when cfg is not 1."),
        io.Latent.Input("latent_image", tooltip="One latent: the size of the pictures, and what sigmas below 1 begin from."),
        io.Vae.Input("vae", tooltip="Decodes the latents."),
        CompareEntries.Input("entries", tooltip="The samplers: a chain of Sampler Entry nodes."),
    ]


def _widgets() -> list[io.Input]:
    return [
        io.Int.Input(
            "seed", default=0, min=0, max=2**64 - 1, control_after_generate=True,
            tooltip="The first seed; each picture is the one that MixGRPO Sampler or KSampler draws with its seed.",
        ),
        io.Int.Input("seeds", default=4, min=1, max=4096, tooltip="Seeds, one after the other: rows of the grid."),
        io.Int.Input(
            "group_size", default=2, min=1, max=4096,
            tooltip="Samples of each seed, from one initial noise; how far they part is the diversity. The grid shows the first; "
            "with a single seed, all.",
        ),
        io.Float.Input(
            "cfg", default=1.0, min=0.0, max=100.0, step=0.1,
            tooltip="Classifier-free guidance of all samplers; 1 ignores the negative prompt and costs half.",
        ),
        io.Int.Input(
            "reference_steps", default=200, min=0, max=10_000,
            tooltip="Steps of the euler run that latents are compared with (rmse); 0 leaves it out.",
        ),
        io.Boolean.Input(
            "equal_nfe", default=False,
            tooltip="Refuse samplers that do not cost as many function evaluations as the first, and say how many steps would.",
        ),
    ]  # fmt: skip


def _rewarding() -> list[io.Input]:
    return [
        Rewards.Input("rewards", optional=True, tooltip="Scores all pictures; the table has the mean and its 95 % interval."),
        io.String.Input(
            "prompt", multiline=True, default="", optional=True,
            tooltip="What the pictures should show, when rewards are connected.",
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Graph:
    """What all samplers are given."""

    model: Any
    positive: Conditioning
    negative: Conditioning
    latent: Tensor  # (1, …)
    mask: Tensor | None
    cfg: float


class GraphHost:
    """A :class:`~..backend.lab.compare.Host` around a MODEL: every draw is a run of a CFGGuider.

    Calls are counted where the guider is asked, rows where the diffusion model is, by wrappers on a clone of the MODEL.
    """

    def __init__(
        self, graph: _Graph, entries: Sequence[GraphEntry], built: Sequence[Entry], group_size: int, progress: _Progress
    ):  # fmt: skip
        from comfy.patcher_extension import WrappersMP

        self.device: torch.device = graph.model.load_device
        self.reference_batch = group_size
        self._graph, self._entries, self._built, self._group_size = graph, entries, built, group_size
        self._progress, self._calls, self._rows = progress, 0, 0
        self._model = graph.model.clone()
        self._model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "mixgrpo_compare", self._count_call)
        self._model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "mixgrpo_compare", self._count_rows)

    def draw(self, entry: int, case: Case, on_step: OnStep) -> Tensor:
        """One group, from one initial noise."""
        import comfy.samplers

        sampler, spec = self._entries[entry].sampler, self._entries[entry].spec
        if spec is not None:
            settings = GroupSettings(self._group_size, True, spec.eta, spec.flow_window, spec.flow_mode)
            sampler = comfy.samplers.KSAMPLER(sample_groups, extra_options={"settings": settings})
        return self._sample([case] * self._group_size, sampler, self._built[entry].sigmas, on_step)

    def reference(self, sigmas: Tensor, cases: Sequence[Case], on_step: OnStep) -> Tensor:
        """Euler, as many cases at once as a group has samples."""
        import comfy.samplers

        return self._sample(cases, comfy.samplers.KSAMPLER(sample_groups, extra_options={"settings": _EULER}), sigmas, on_step)

    def counted(self) -> tuple[int, int]:
        """Model calls and rows since the last time."""
        counted, self._calls, self._rows = (self._calls, self._rows), 0, 0
        return counted

    def _sample(self, cases: Sequence[Case], sampler: Any, sigmas: Tensor, on_step: OnStep) -> Tensor:
        """One row for every case; the sampler's own noise is seeded by the first."""
        import comfy.samplers

        graph = self._graph
        guider = comfy.samplers.CFGGuider(self._model)
        guider.set_conds(graph.positive, graph.negative)
        guider.set_cfg(graph.cfg)
        noise = torch.cat([initial_noise(case.seed, graph.latent.shape) for case in cases])
        samples = guider.sample(
            noise, graph.latent.repeat_interleave(len(cases), 0), sampler, sigmas, denoise_mask=graph.mask,
            callback=self._progress.callback(on_step), disable_pbar=True, seed=cases[0].seed,
        )  # fmt: skip
        return self._model.model.process_latent_in(samples.float())

    def _count_call(self, executor: Callable, *args: Any, **kwargs: Any) -> Tensor:
        self._calls += 1
        return executor(*args, **kwargs)

    def _count_rows(self, executor: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._rows += len(x)
        return executor(x, *args, **kwargs)


class _Progress:
    """ComfyUI's bar over all draws, with a preview of the newest step."""

    def __init__(self, model: Any):
        import latent_preview

        self._previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)
        self._bar, self._preview = None, None

    def callback(self, on_step: OnStep) -> Callable[[int, Tensor, Tensor, int], None]:
        """What a guider calls after every step."""

        def callback(step: int, denoised: Tensor, x: Tensor, steps: int) -> None:
            if self._previewer:
                self._preview = self._previewer.decode_latent_to_preview_image("JPEG", denoised)
            on_step(step + 1)

        return callback

    def report(self, done: int, total: int) -> None:
        """Show steps done and steps in all."""
        import comfy.utils

        self._bar = self._bar or comfy.utils.ProgressBar(total)
        self._bar.update_absolute(done, total, self._preview)

    def conclude(self, picture: Image.Image) -> None:
        """Leave a picture in place of the last preview, which the page goes on showing instead of the node's output."""
        self._bar.update_absolute(self._bar.total, self._bar.total, ("PNG", picture, None))


def _one_latent(model: Any, given: dict[str, Any]) -> Tensor:
    """The latent (1, …) that all samples begin from."""
    import comfy.sample

    if given["samples"].is_nested:
        raise GraphError("samplers are compared on one kind of latent at a time, and this one holds several; use an image's")
    latent = comfy.sample.fix_empty_latent_channels(model, given["samples"])
    if len(latent) != 1:
        raise GraphError(f"all samples begin from one latent, but there are {len(latent)}; use a batch size of 1 and more seeds")
    return latent


def _check_prompt(rewards: Sequence[RewardSpec], prompt: str) -> None:
    if not prompt.strip():
        raise GraphError("there is no prompt to score the pictures against; write what they should show")
    check_rewards(rewards, [prompt.strip()])


def _numbers_in_a_picture(vae: Any, latent: Tensor) -> int:
    """Frames x height x width x 3 of what the VAE makes of a latent."""
    scale = vae.spacial_compression_decode()
    frames = (latent.shape[2] - 1) * (vae.temporal_compression_decode() or 1) + 1 if latent.ndim == 5 else 1
    return int(3 * frames * latent.shape[-2] * latent.shape[-1] * scale**2)


def _decoded(model: Any, vae: Any, latents: Tensor) -> Tensor:
    """Pictures (cases, G, frames, height, width, 3) on the CPU of latents (cases, G, …) in the model's scale."""
    images = vae.decode(model.model.process_latent_out(latents.flatten(0, 1)))[..., :3].float().cpu()
    frames = images if images.ndim == 5 else images[:, None]
    return frames.unflatten(0, latents.shape[:2])


def _first_frames(images: Tensor) -> Tensor:
    """(cases, G, 3, height, width) of (cases, G, frames, height, width, 3)."""
    return images[:, :, 0].movedim(-1, 2)


def _as_image(picture: Image.Image) -> Tensor:
    """An IMAGE (1, height, width, 3)."""
    return torch.from_numpy(numpy.array(picture)).float().div(255)[None]


def _output_folder() -> Path:
    import folder_paths

    return Path(folder_paths.get_output_directory()) / "mixgrpo"
