"""The held-out judge: a small classifier that reads a scene in another way than the reward does.

Scene accuracy is a hand-written reading of pixels, which a learner could come to exploit. This network learnt from
examples instead, shares no line with it and is never trained on, so a gain that both see is a gain in the pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import trange

from ..files import StorageError, load_tensors, save_tensors
from ..rewards.base import check_batch, with_failures
from ..rewards.scene import world_pictures
from . import world
from .judge_scenes import JudgeScenes
from .world import CLASSES, stated_classes

WEIGHTS = Path(__file__).parent / "weights" / "judge.safetensors"
_WELL_FORMED = "well_formed"
_BATCH = 256


class JudgeNetwork(nn.Module):
    """Five convolutions and a hidden layer (under 150,000 parameters), with one linear head for every attribute.

    Input: pictures (B, 3, 64, 64) in [0, 1]. Output: logits (B, classes) for every name in :data:`~.world.CLASSES`, and
    ``well_formed`` (B,): whether the picture is a scene of the world at all.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 24, 32, 48, 64)
        layers: list[nn.Module] = []
        for depth, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
            stride = 1 if depth == 2 else 2
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 72), nn.ReLU(inplace=True))
        self.heads = nn.ModuleDict({name: nn.Linear(72, len(classes)) for name, classes in CLASSES.items()})
        self.heads[_WELL_FORMED] = nn.Linear(72, 1)

    def forward(self, pictures: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(2 * pictures - 1)
        logits = {name: head(features) for name, head in self.heads.items()}
        return {**logits, _WELL_FORMED: logits[_WELL_FORMED].squeeze(1)}


class HeldOutJudge:
    """Probability that a picture shows its caption: of every stated attribute, times that of a well-formed scene."""

    name = "held_out_judge"
    held_out = True

    def __init__(self, network: JudgeNetwork):
        self._network = network.eval()

    @classmethod
    def load(cls, path: Path = WEIGHTS) -> HeldOutJudge:
        """Read the weights that :func:`train_judge` wrote.

        Raises:
            StorageError: the file is missing, broken, or holds another network.
        """
        network = JudgeNetwork()
        tensors = load_tensors(path)
        try:
            network.load_state_dict(tensors)
        except RuntimeError as error:
            raise StorageError(f"{path} does not hold the held-out judge; train it again with the starter script") from error
        return cls(network)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise :class:`~mixgrpo.backend.starter.world.CaptionError` for the first prompt outside the grammar."""
        for prompt in prompts:
            world.parse_caption(prompt)

    def score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Score square pictures (N, 3, S, S) in [0, 1]; other sizes than 64 are resized.

        Returns:
            float32 (N,) in [0, 1]: the product over what the caption states; NaN for a picture with NaN or infinite values.

        Raises:
            CaptionError: a prompt is outside the starter world's grammar.
            BatchError: pictures and prompts do not fit, or the pictures are not square.
        """
        finite = check_batch(images, prompts)
        stated = [stated_classes(world.parse_caption(prompt)) for prompt, scored in zip(prompts, finite, strict=True) if scored]
        pictures = world_pictures(images[finite.to(images.device)])
        values = [
            self._probabilities(pictures[start : start + _BATCH], stated[start : start + _BATCH])
            for start in range(0, len(pictures), _BATCH)
        ]
        return with_failures(torch.cat([torch.zeros(0), *values]), finite)

    @torch.no_grad()
    def _probabilities(self, pictures: torch.Tensor, stated: Sequence[dict[str, int]]) -> torch.Tensor:
        logits = self._network(pictures)
        total = nn.functional.logsigmoid(logits[_WELL_FORMED])
        for name in CLASSES:
            classes = torch.tensor([facts[name] for facts in stated])
            total = total + logits[name].log_softmax(1).gather(1, classes[:, None])[:, 0]
        return total.exp()


def train_judge(
    folder: Path, seed: int = 0, steps: int = 2000, scenes: int = 16_000, batch: int = 96, checked: int = 1000
) -> float:
    """Train the judge on random scenes and write ``folder/judge.safetensors`` (float16, under 300 kB).

    Args:
        folder: holds ``latent_code.safetensors``, whose blocks some of the training pictures are rebuilt from.

    Returns:
        Share in [0, 1] of ``checked`` new true pictures in which every attribute is read right.
    """
    torch.manual_seed(seed)
    network = JudgeNetwork().train()
    data = JudgeScenes(folder / "latent_code.safetensors", scenes, seed)
    stated = [stated_classes(world.parse_caption(caption)) for caption in data.captions]
    targets = {name: torch.tensor([facts[name] for facts in stated]) for name in CLASSES}
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.15)
    bar = trange(steps, desc="judge", mininterval=5)
    for step in bar:
        pictures, rows, well_formed = data.batch(step, batch)
        logits = network(pictures)
        loss = nn.functional.binary_cross_entropy_with_logits(logits[_WELL_FORMED], well_formed.float())
        for name, target in targets.items():
            loss = loss + nn.functional.cross_entropy(logits[name][well_formed], target[rows[well_formed]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    weights = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in network.state_dict().items()}
    path = save_tensors(folder / "judge.safetensors", weights, {"seed": str(seed), "steps": str(steps)})
    return reading_accuracy(HeldOutJudge.load(path), checked, seed + 1)


def reading_accuracy(judge: HeldOutJudge, count: int, seed: int) -> float:
    """Share of new true pictures to which the judge gives more than one half."""
    pictures, captions = JudgeScenes.true_pictures(count, seed)
    return (judge.score(pictures, captions) > 0.5).float().mean().item()
