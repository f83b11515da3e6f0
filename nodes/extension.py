"""The list of nodes that ComfyUI loads."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .compare import CompareSamplers
from .compare_entry import CompareEntry
from .hybrid import HybridModel
from .lora import LoadLora
from .mode import SamplingModeNode
from .plan import SamplingPlan
from .plot import TrajectoryPlot
from .rewards import HeldOutJudge, JpegCompressibility, JpegIncompressibility, SceneAccuracy
from .rows import LabelledPictures
from .sampler import FlowSampler, FlowSamplerObject
from .schedule import FlowSigmas
from .score import ScoreImages
from .settings import TrainingLora, TrainingOptimizer, TrainingSampling
from .starter import StarterModel
from .train import TrainStep

NODES: list[type[io.ComfyNode]] = [
    StarterModel,
    FlowSampler,
    FlowSamplerObject,
    FlowSigmas,
    TrajectoryPlot,
    SamplingModeNode,
    SamplingPlan,
    HybridModel,
    SceneAccuracy,
    JpegCompressibility,
    JpegIncompressibility,
    HeldOutJudge,
    ScoreImages,
    LabelledPictures,
    TrainingSampling,
    TrainingLora,
    TrainingOptimizer,
    TrainStep,
    LoadLora,
    CompareEntry,
    CompareSamplers,
]


class MixGRPOExtension(ComfyExtension):
    """All nodes of the category MixGRPO."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)
