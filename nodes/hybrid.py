"""Hybrid inference: the trained model draws the early steps, the base model the late ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..backend.flow.hybrid import hybrid_boundary
from ..backend.flow.sigmas import check_sigmas
from .checks import GraphError, check_flow
from .types import CATEGORY


class HybridModel(io.ComfyNode):
    """A MODEL that is the trained one above a boundary sigma and the base model below it, for every sampler and guider."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MixGRPO_HybridModel",
            display_name="Hybrid Model",
            category=CATEGORY,
            description="The trained MODEL for the early, noisy steps and the base MODEL for the late ones: the composition is "
            "the trained one, the fine texture the base's.",
            inputs=[
                io.Model.Input("trained", tooltip="The MODEL with the trained LoRA."),
                io.Model.Input("base", tooltip="The same MODEL without it."),
                io.Sigmas.Input("sigmas", tooltip="The table that will be sampled with; the share is one of its steps."),
                io.Float.Input(
                    "share", default=0.8, min=0.0, max=1.0, step=0.05,
                    tooltip="Of the steps, counted from the start, that the trained MODEL takes; the paper recommends 0.8. "
                    "0 is the base MODEL and 1 the trained one, bit for bit.",
                ),
            ],
            outputs=[io.Model.Output("model", display_name="MODEL", tooltip="For any sampler; guidance included.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, trained, base, sigmas, share) -> io.NodeOutput:
        for model in (trained, base):
            check_flow(model.get_model_object("model_sampling"))
        kinds = [type(model.model).__name__ for model in (trained, base)]
        if kinds[0] != kinds[1]:
            raise GraphError(
                f"the trained MODEL is of the kind {kinds[0]} and the base MODEL of the kind {kinds[1]}; connect the model "
                "that was trained, with and without its LoRA"
            )
        check_sigmas(sigmas)
        boundary = hybrid_boundary(sigmas, share)
        steps = len(sigmas) - 1
        summary = {"steps": steps, "trained_steps": sum(sigma > boundary for sigma in sigmas[:-1].tolist())}
        if math.isinf(boundary):  # one of the two alone
            return io.NodeOutput(base if boundary > 0 else trained, ui={"mixgrpo_hybrid": [summary | {"boundary": None}]})
        return io.NodeOutput(hybrid_model(trained, base, boundary), ui={"mixgrpo_hybrid": [summary | {"boundary": boundary}]})


def hybrid_model(trained: Any, base: Any, boundary: float) -> Any:
    """A clone of ``trained`` whose guider asks ``base`` at sigmas of at most ``boundary``.

    Patches of the weights are those of either MODEL; what is attached to the MODEL otherwise (attention patches, wrappers) is
    ``trained``'s throughout.
    """
    from comfy.patcher_extension import WrappersMP

    model = trained.clone()
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "MixGRPO hybrid", _Switch(base, boundary))
    return model


class _Switch:
    """Around a guider's ``predict_noise``: loads the weights of the MODEL whose turn it is, as ComfyUI does before sampling.

    A LoRA is a patch on weights that both MODELs share, so there is one model in memory; ComfyUI keeps what the patches replaced
    and puts exactly that back. Two models that were loaded separately work too, and take the memory of two.
    """

    def __init__(self, base: Any, boundary: float):
        self._base, self._boundary = base, boundary

    def __call__(
        self, executor: Callable[..., Tensor], x: Tensor, timestep: Tensor, model_options: dict[str, Any], seed: int | None = None
    ) -> Tensor:
        from comfy.sampler_helpers import prepare_sampling

        guider = executor.class_obj
        if "registered_hooks" in model_options:
            raise GraphError("a Hybrid Model changes weights while it samples, and so do the hooks in this conditioning; use one")
        turn = self._base if timestep.max().item() <= self._boundary else guider.model_patcher
        if turn.model.current_weight_patches_uuid != turn.patches_uuid:
            prepare_sampling(turn, x.shape, guider.conds, model_options)
        if turn.model is guider.inner_model:
            return executor(x, timestep, model_options, seed)
        own, guider.inner_model = guider.inner_model, turn.model
        turn.pre_run()
        try:
            return executor(x, timestep, model_options, seed)
        finally:
            turn.cleanup()
            guider.inner_model = own
