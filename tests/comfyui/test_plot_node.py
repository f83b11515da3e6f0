"""Trajectory Plot: its numbers are the trajectory's, and a graph gets a picture with the window where it is."""

from __future__ import annotations

import io
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from graph_server import GraphServer
from PIL import Image
from train_graphs import node

from mixgrpo.backend.flow.rollout import Trajectory, rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import Window
from mixgrpo.backend.plot import SHADE, panel_boxes
from mixgrpo.backend.plot.canvas import PALETTE

STEPS = 8


@pytest.fixture
def plot(comfy) -> ModuleType:
    from mixgrpo.nodes import plot

    return plot


def draw(size: int = 3, eta: float = 0.7, group_size: int = 4, shared: bool = True, groups: int = 2) -> Trajectory:
    """A rollout of latents (2, 3, 5), video-like, with a window that begins at step 2."""
    generator = torch.Generator().manual_seed(0)
    rows = groups * group_size
    initial = torch.randn(groups if shared else rows, 2, 3, 5, generator=generator)
    return rollout(
        lambda x, sigma: 0.3 * x + sigma, initial, shifted_sigmas(STEPS, 3.0), Window(2, size), eta,
        lambda step: torch.randn(rows, 2, 3, 5, generator=generator), group_size, shared=shared,
    )  # fmt: skip


def test_the_charts_show_the_trajectory(plot):
    trajectory = draw()
    sigma, noise, log_prob, spread = plot.trajectory_panels(trajectory)
    assert list(sigma.lines[0].x) == list(range(STEPS + 1)) and sigma.lines[0].y == trajectory.sigmas.tolist()
    assert list(sigma.shaded) == [(2, 5)]
    assert list(noise.lines[0].x) == [2, 3, 4] and noise.lines[0].y == trajectory.stds
    assert list(log_prob.lines[0].x) == [2, 3, 4] and list(spread.lines[0].x) == [2, 3, 4, 5]
    for index in range(3):
        groups = trajectory.log_probs[index].double().view(2, 4)
        mean, std = groups.mean().item(), ((groups[0].var() + groups[1].var()) / 2).sqrt().item()
        line = log_prob.lines[0]
        assert [line.y[index], line.low[index], line.high[index]] == pytest.approx([mean, mean - std, mean + std])
    assert spread.lines[0].y[0] == 0, "one latent for the whole group"
    for index in range(1, 4):
        first, second = trajectory.states[index].double().view(2, 4, -1)
        distances = [((group - group.mean(0)) ** 2).mean() for group in (first, second)]
        assert spread.lines[0].y[index] == pytest.approx((sum(distances).item() / 2) ** 0.5)
    assert "gaussian" in log_prob.title


def test_own_noise_is_a_spread_from_the_beginning(plot):
    assert plot.trajectory_panels(draw(shared=False))[3].lines[0].y[0] > 0.5


def test_a_trajectory_that_begins_later_keeps_its_absolute_steps(plot):
    whole = draw()
    tail = Trajectory(**vars(whole) | {"sigmas": whole.sigmas[1:], "first_step": 1})
    sigma, noise, *_ = plot.trajectory_panels(tail)
    assert list(sigma.lines[0].x) == list(range(1, STEPS + 1)) and list(sigma.shaded) == [(2, 5)]
    assert list(noise.lines[0].x) == [2, 3, 4] and len(noise.lines[0].y) == 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"eta": 0.0}, "no step is stochastic: eta is 0"), ({"size": 0}, "no step is stochastic: the window is empty")],
)
def test_without_a_stochastic_step_the_charts_say_so(plot, settings, sentence):
    sigma, *others = plot.trajectory_panels(draw(**settings))
    assert not sigma.shaded and len(sigma.lines[0].y) == STEPS + 1
    for panel in others:
        assert panel.note == sentence and not any(len(line.y) for line in panel.lines)


def test_one_sample_is_drawn(plot):
    *_, log_prob, spread = plot.trajectory_panels(draw(group_size=1, groups=1, size=1))
    assert len(log_prob.lines[0].y) == 1 and not log_prob.lines[0].low
    assert spread.note == "a group of one sample has no spread" and not spread.lines[0].y
    assert plot.draw_panels(plot.trajectory_panels(draw(group_size=1, groups=1, size=1)), 2).size == (1040, 700)


def test_what_is_not_a_number_leaves_a_gap(plot):
    trajectory = draw()
    trajectory.log_probs[1, 0] = math.nan
    trajectory.states[2][0] = math.nan
    panels = plot.trajectory_panels(trajectory)
    assert panels[2].lines[0].y[1] != panels[2].lines[0].y[1]
    assert plot.draw_panels(panels, 2).size == (1040, 700)


def picture(server: GraphServer, outputs: dict, name: str) -> Image.Image:
    (shown,) = outputs[name]["images"]
    where = f"filename={shown['filename']}&subfolder={shown['subfolder']}&type={shown['type']}"
    return Image.open(io.BytesIO(server.fetch(f"/view?{where}"))).convert("RGB")


def shaded(picture: Image.Image) -> tuple[float, float]:
    """Left and right of the shade, as shares of the sigma chart's width between its first and last dot."""
    scale = picture.width / 1040
    box = panel_boxes(4, 2)[0]
    panel = np.array(picture.crop([round(edge * scale) for edge in (box.left, box.top + 50, box.right, box.bottom)]))
    blue = np.nonzero((panel == PALETTE[0]).all(-1))[1]
    shade = np.nonzero((panel == SHADE).all(-1).sum(0) > 0.3 * len(panel))[0]
    span = blue.max() - blue.min()
    return (shade.min() - blue.min()) / span, (shade.max() + 1 - blue.min()) / span


def test_a_graph_gets_the_picture(server: GraphServer):
    links = {"model": ["starter", 0], "positive": ["text", 0], "negative": ["text", 0], "latent_image": ["latent", 0]}
    settings = {"seed": 3, "steps": STEPS, "schedule": "shift", "shift": 3.0, "cfg": 1.0, "group_size": 3, "shared_noise": True}
    windows = {"early": (0, 2), "late": (4, 3), "none": (1, 0)}
    graph = {
        "starter": node("MixGRPO_StarterModel"),
        "text": node("CLIPTextEncode", clip=["starter", 1], text="a red circle on a white background"),
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=2),
        "saved": node("PreviewImage", images=["late", 0]),
    }
    for name, (start, size) in windows.items():
        window = {"eta": 0.7, "window_start": start, "window_size": size}
        graph[f"draw {name}"] = node("MixGRPO_Sampler", **links | settings | window)
        graph[name] = node("MixGRPO_TrajectoryPlot", trajectory=[f"draw {name}", 1], width=1536)
    graph["early"]["inputs"].pop("width")
    outputs = server.run(graph)
    early, late, none = (picture(server, outputs, name) for name in windows)
    assert early.size == (1024, 689) and late.size == none.size == (1536, 1034)
    assert shaded(early) == pytest.approx((0, 2 / STEPS), abs=0.02)
    assert shaded(late) == pytest.approx((4 / STEPS, 7 / STEPS), abs=0.02)
    assert not (np.array(none) == SHADE).all(-1).any()
    assert (np.array(picture(server, outputs, "saved")) == np.array(late)).all(), "what is shown is what is handed on"
