"""Every sampling mode through ComfyUI: its own solvers where they are the same, counted rows, the plan, the whole matrix."""

from __future__ import annotations

import itertools

import pytest
import torch
from starter_graph import CAPTION, TOLERANCE, draw, empty, relative
from tiny_flow import model_rows, prompt, sample, stock, tiny_model

from mixgrpo.backend.errors import MixGRPOError
from mixgrpo.backend.flow.dynamics import SDE_DYNAMICS
from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.flow.plan import FLASH, FLASH_STAR, MIXGRPO, SamplingMode
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.solvers import SOLVERS
from mixgrpo.backend.flow.window import Window

SHAPE = (16, 4, 4)
NOISE = initial_noise(3, (6, *SHAPE))
TABLE = shifted_sigmas(8, 3.0).float()


@pytest.fixture(scope="module")
def tiny(comfy):
    return tiny_model(comfy)


def mode_of(**widgets) -> SamplingMode:
    """What the node gives."""
    from mixgrpo.nodes.mode import SamplingModeNode

    defaults = {entry.id: entry.default for entry in SamplingModeNode.define_schema().inputs}
    return SamplingModeNode.execute(**defaults | widgets).result[0]


def test_the_node_means_the_papers_modes(comfy):
    assert mode_of() == MIXGRPO
    assert mode_of(solver_after="dpmpp_2m", ratio=0.4) == FLASH
    assert mode_of(solver_after="dpmpp_2m", ratio=0.2) == FLASH_STAR
    assert mode_of(solver="heun", dynamics="cps").after == "heun"
    with pytest.raises(MixGRPOError, match="dynamics 'kps' does not exist; choose one of flow_sde, dance_sde, cps, precise"):
        mode_of(dynamics="kps")
    with pytest.raises(MixGRPOError, match="solver 'eular' does not exist"):
        mode_of(solver_after="eular")


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("off", [{"eta": 0.0}, {"window": Window(0, 0)}], ids=["eta 0", "empty window"])
@pytest.mark.parametrize("name", ["euler", "heun"])
def test_single_step_solvers_are_comfyuis_bit_for_bit(comfy, tiny, graph, name, off, cfg):
    for model, noise, positive, negative in (
        (tiny, NOISE, prompt(0.5), prompt(-0.5)),
        (graph.model, initial_noise(3, (3, 16, 8, 8)), graph.encode[CAPTION], graph.encode[""]),
    ):
        ours, _ = sample(comfy, model, noise, TABLE, positive, negative=negative, cfg=cfg, mode=SamplingMode(solver=name), **off)
        assert torch.equal(ours, stock(comfy, model, noise, TABLE, positive, name, negative=negative, cfg=cfg))


@pytest.mark.parametrize(("name", "variant"), [("dpmpp_2m", "midpoint"), ("dpmpp_2m_heun", "heun")])
def test_dpm_solver_is_comfyuis_below_sigma_1(comfy, tiny, name, variant):
    """ComfyUI's dpmpp_2m is written for eps models; in lambda of a flow it has dpmpp_2m_sde, whose eta 0 is the same solver.

    From sigma 1 ComfyUI moves the first sigma to 0.9997 instead of taking a step of order 1, so only a tail compares.
    """
    tail, latent = TABLE[2:], initial_noise(9, NOISE.shape)
    ours, run = sample(comfy, tiny, NOISE, tail, prompt(0.5), latent, mode=SamplingMode(solver=name), eta=0.0)
    theirs = stock(comfy, tiny, NOISE, tail, prompt(0.5), "dpmpp_2m_sde", latent, eta=0.0, s_noise=0.0, solver_type=variant)
    assert [step.order for step in run.trajectory.plan.steps] == [1, 2, 2, 2, 2, 1]
    assert relative(ours, theirs) < TOLERANCE
    euler = stock(comfy, tiny, NOISE, tail, prompt(0.5), "euler", latent)
    first, _ = sample(comfy, tiny, NOISE, tail, prompt(0.5), latent, mode=SamplingMode(solver="dpmpp_1m"), eta=0.0)
    assert relative(first, euler) < TOLERANCE < relative(ours, euler)


MODES = {
    "MixGRPO": {},
    "Flash": {"solver_after": "dpmpp_2m", "ratio": 0.4},
    "Flash, reset": {"solver_after": "dpmpp_3m", "ratio": 0.5, "history": "reset"},
    "Heun before": {"solver": "heun", "solver_after": "euler"},
    "Heun after": {"solver_after": "heun"},
    "CPS": {"dynamics": "cps", "log_prob": "variance_free"},
    "Precise": {"dynamics": "precise", "log_prob": "ratio_norm", "solver": "dpmpp_2m"},
    "Dance": {"dynamics": "dance_sde"},
}


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("shared", [True, False], ids=["shared noise", "own noise"])
@pytest.mark.parametrize("name", MODES)
def test_rows_are_counted_predicted_and_planned(graph, name, shared, cfg):
    """A hook on the model, the sampler's own count, its prediction, and Sampling Plan's, which saw no model."""
    from mixgrpo.nodes.plan import SamplingPlan

    mode = mode_of(**MODES[name])
    groups = {"group_size": 4, "shared_noise": shared, "eta": 0.5, "window_start": 3, "window_size": 2}
    rows, hook = model_rows(graph.model)
    try:
        _, trajectory, summary = draw(graph, empty(2), steps=10, cfg=cfg, mode=mode, **groups)
    finally:
        hook.remove()
    planned = SamplingPlan.execute(steps=10, shift=3.0, cfg=cfg, mode=mode, **groups)
    text, nfe, planned_rows = planned.result
    assert sum(rows) == summary["rows"] == summary["rows_predicted"] == 2 * planned_rows
    assert summary["nfe"] == nfe and len(rows) == nfe
    assert summary["steps"] == planned.ui["mixgrpo_plan"][0]["steps"]
    assert summary["shared_prefix"] == ("used" if shared else "not shared")
    assert [step["kind"] for step in summary["steps"]][:5] == ["ode"] * 3 + ["sde"] * 2
    assert [step["std"] for step in summary["steps"] if step["kind"] == "sde"] == summary["std"] == trajectory.stds
    assert trajectory.mode == mode and summary["mode"]["dynamics"] == mode.dynamics
    lines = text.splitlines()
    assert f"{nfe} model calls" in lines[0] and lines[1].startswith(f"- {planned_rows} model rows for a group of 4")
    assert len(lines) == 5 + len(summary["steps"]) and {line.count("|") for line in lines[3:]} == {9}
    assert len({line.index("ode") for line in lines if " ode " in line}) == 1


def test_a_group_of_eight_in_the_paper_costs_109_rows_of_200(comfy):
    from mixgrpo.nodes.plan import SamplingPlan

    text, nfe, rows = SamplingPlan.execute(
        steps=25, shift=3.0, cfg=1.0, group_size=8, shared_noise=True, eta=0.7, window_start=12, window_size=4
    ).result
    assert (nfe, rows) == (25, 109) and "109 model rows for a group of 8, of 200 without its shared beginning" in text


def test_a_plan_that_cannot_be_is_refused_without_a_model(comfy):
    from mixgrpo.nodes.plan import SamplingPlan

    widgets = {"steps": 8, "shift": 3.0, "cfg": 1.0, "group_size": 4, "shared_noise": True, "eta": 0.7, "window_start": 0}
    with pytest.raises(MixGRPOError, match="start \\+ size may be at most 7"):
        SamplingPlan.execute(window_size=8, **widgets)
    with pytest.raises(MixGRPOError, match="eta 3.0 is too large for step"):
        SamplingPlan.execute(window_size=4, **widgets | {"eta": 3.0})
    with pytest.raises(MixGRPOError, match="a ratio of 0.4 shortens all steps after the window, but steps 0 to 3 are only some"):
        SamplingPlan.execute(window_size=2, sigmas=TABLE[:5], mode=FLASH, **widgets)
    with pytest.raises(MixGRPOError, match="so the members of a group have parted"):
        SamplingPlan.execute(window_size=2, sigmas=TABLE[1:], first_step=1, **widgets)


def test_what_keeps_a_group_from_sharing_is_named(comfy, tiny, caplog):
    """Off by itself, and saying so."""
    caplog.set_level("INFO")
    shared = {"group_size": 3, "shared_noise": True, "window": Window(2, 2)}
    mask = torch.ones(1, 1, 4, 4)
    cases = {
        "used": ({}, prompt(0.5)),
        "not shared": ({"shared_noise": False}, prompt(0.5)),
        "mask": ({"mask": mask}, prompt(0.5)),
        "batched conditioning": ({}, prompt(*[0.5] * 6)),
    }
    drawn = {}
    for reason, (more, positive) in cases.items():
        caplog.clear()
        own = more.get("shared_noise", True)
        noise = NOISE if own else NOISE[::3].repeat_interleave(3, 0)
        drawn[reason], run = sample(comfy, tiny, noise, TABLE, positive, **shared | more)
        assert run.prefix == reason
        assert run.rows == (2 * 3 + 6 * 5 if reason == "used" else 6 * 8)
        assert (f"because of: {reason}" in caplog.text) == (reason not in ("used", "not shared"))
    assert all(relative(drawn["used"], samples) < TOLERANCE for samples in drawn.values())
    from mixgrpo.nodes.checks import differs_by_row

    assert differs_by_row(object(), None) == "guider"  # of another pack, which may tell rows apart in ways of its own


WINDOWS, ETAS = (Window(0, 0), Window(0, 1), Window(1, 2), Window(0, 9)), (0.0, 0.3, 1.0, 1.6)


@pytest.mark.parametrize("steps", [1, 2, 4, 10])
@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_the_matrix_is_finite_with_the_right_rows_or_refused_in_a_sentence(comfy, tiny, steps, dynamics):
    """Dynamics, solver, window, eta, steps and Flash; the kinds of solver before and after the window go around."""
    table, names, ran, refused = shifted_sigmas(steps, 3.0).float(), list(SOLVERS), 0, 0
    for number, (solver, window, eta) in enumerate(itertools.product(SOLVERS, WINDOWS, ETAS)):
        after, ratio = names[number % len(names)], (1.0, 0.4)[number // 3 % 2]
        mode = SamplingMode(dynamics, solver=solver, solver_after=after, ratio=ratio)
        rows, hook = model_rows(tiny)
        settings = {"group_size": 3, "shared_noise": True, "eta": eta, "window": window, "mode": mode}
        try:
            samples, run = sample(comfy, tiny, NOISE, table, prompt(0.5), **settings)
        except MixGRPOError as refusal:
            assert not rows and 40 < len(str(refusal)) and "\n" not in str(refusal)
            refused += 1
        else:
            assert samples.shape == NOISE.shape and torch.isfinite(samples).all() and samples.dtype == torch.float32
            assert run.rows == sum(rows) == run.trajectory.plan.rows(3, 2)
            ran += 1
        finally:
            hook.remove()
    assert ran >= 24 and ran + refused == 96


@pytest.mark.parametrize("name", ["MixGRPO", "Flash", "Heun before", "Heun after", "Precise"])
def test_the_callback_comes_once_a_step_and_ends_at_the_last(comfy, tiny, name):
    seen = []
    callback = lambda i, x0, x, total: seen.append((i, len(x0), total))  # noqa: E731
    settings = {"group_size": 3, "shared_noise": True, "window": Window(2, 2), "mode": mode_of(**MODES[name])}
    _, run = sample(comfy, tiny, NOISE, TABLE, prompt(0.5), callback=callback, **settings)
    shown = [i for i, _, _ in seen]
    assert shown == sorted(set(shown)) and shown[-1] == 7 and len(shown) == len(run.trajectory.plan.steps)
    assert all(rows == 6 and total == 8 for _, rows, total in seen)
    if name != "Flash":
        assert shown == list(range(8))
