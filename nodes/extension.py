"""The list of nodes that ComfyUI loads."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .rewards import JpegCompressibility, JpegIncompressibility, SceneAccuracy
from .rows import LabelledPictures
from .sampler import FlowSampler, FlowSamplerObject
from .schedule import FlowSigmas
from .score import ScoreImages
from .starter import StarterModel

NODES: list[type[io.ComfyNode]] = [
    StarterModel,
    FlowSampler,
    FlowSamplerObject,
    FlowSigmas,
    SceneAccuracy,
    JpegCompressibility,
    JpegIncompressibility,
    ScoreImages,
    LabelledPictures,
]


class MixGRPOExtension(ComfyExtension):
    """All nodes of the category MixGRPO."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)
