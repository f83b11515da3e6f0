"""Everything ComfyUI can hand a sampler: tails, split tables, masks, axes, hooks, control, previews, interrupts, other models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from starter_graph import CAPTION, TOLERANCE, draw, empty, relative
from tiny_flow import model_rows, prompt, sample, stock, tiny_lora, tiny_model, with_lora

from mixgrpo.backend.errors import MixGRPOError
from mixgrpo.backend.flow.dynamics import SDE_DYNAMICS
from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.flow.plan import FLASH, SamplingMode
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.solvers import SOLVERS
from mixgrpo.backend.flow.window import Window

SHAPE = (16, 4, 4)
NOISE = initial_noise(3, (6, *SHAPE))
PICTURE = initial_noise(8, (6, *SHAPE))
TABLE = shifted_sigmas(8, 3.0).float()
SHARED = {"group_size": 3, "shared_noise": True}


@pytest.fixture(scope="module")
def tiny(comfy):
    return tiny_model(comfy)


def the_first(rows: torch.Tensor) -> torch.Tensor:
    """The first of every three rows, for all of them."""
    return rows[::3].repeat_interleave(3, 0)


# denoise < 1: a tail of the table


@pytest.mark.parametrize("name", ["euler", "heun"])
def test_a_tail_without_noise_is_comfyuis(comfy, tiny, name):
    for tail in (TABLE[1:], TABLE[5:], TABLE[7:]):
        ours, _ = sample(
            comfy, tiny, NOISE, tail, prompt(0.5), PICTURE, eta=0.0, first_step=9 - len(tail), mode=SamplingMode(solver=name)
        )
        assert torch.equal(ours, stock(comfy, tiny, NOISE, tail, prompt(0.5), name, PICTURE))


def test_the_window_of_a_tail_counts_from_the_whole_tables_first_step(comfy, graph):
    picture = initial_noise(8, (2, 16, 8, 8))
    whole = shifted_sigmas(8, 3.0).float()
    _, trajectory, summary = draw(graph, {"samples": picture}, sigmas=whole[3:], first_step=3, window_start=4, window_size=2)
    assert [step["step"] for step in summary["steps"] if step["kind"] == "sde"] == [4, 5] == list(trajectory.window.steps)
    assert summary["window"] == [4, 2] and summary["nfe"] == 5
    _, outside, summary = draw(
        graph, {"samples": picture}, sigmas=whole[3:], first_step=3, window_start=0, window_size=3, group_size=1
    )
    assert not outside.states and all(step["kind"] == "ode" for step in summary["steps"])


# split tables


def in_two(comfy, tiny, cut: int, cfg: float = 1.0, **settings) -> torch.Tensor:
    """Two runs, the second from where the first stopped and without new noise, as SplitSigmas and SamplerCustom do it."""
    shared, positive = settings.pop("shared_noise"), prompt(0.5)
    first, _ = sample(comfy, tiny, NOISE, TABLE[: cut + 1], positive, shared_noise=shared, cfg=cfg, **settings)
    parted = settings["eta"] > 0 and settings["window"].start < cut
    settings |= {"shared_noise": shared and not parted, "first_step": cut}
    return sample(comfy, tiny, torch.zeros_like(first), TABLE[cut:], positive, first, cfg=cfg, **settings)[0]


SPLIT_MODES = {
    **{name: (SamplingMode(name), 0.7) for name in SDE_DYNAMICS},
    "euler": (SamplingMode(), 0.0),
    "heun around": (SamplingMode("precise", solver="heun"), 0.7),
    "Flash": (SamplingMode(solver_after="euler", ratio=0.4), 0.7),
}


@pytest.mark.parametrize("shared", [True, False], ids=["shared noise", "own noise"])
@pytest.mark.parametrize("cut", [1, 2, 3, 5], ids=["before the window", "at it", "in it", "at its end"])
@pytest.mark.parametrize("name", SPLIT_MODES)
def test_two_runs_over_a_split_table_are_one(comfy, tiny, name, cut, shared):
    mode, eta = SPLIT_MODES[name]
    if name == "Flash" and cut < 5:
        mode = SamplingMode(solver_after="euler")  # the first part would have to shorten steps it does not hold
    settings = {"group_size": 3, "shared_noise": shared, "eta": eta, "window": Window(2, 3), "mode": mode}
    whole, _ = sample(comfy, tiny, NOISE, TABLE, prompt(0.5), **settings)
    assert relative(whole, in_two(comfy, tiny, cut, **settings)) < TOLERANCE


def test_a_multistep_solver_begins_anew_in_the_second_part(comfy, tiny):
    settings = {
        "group_size": 1,
        "shared_noise": False,
        "eta": 0.0,
        "window": Window(0, 0),
        "mode": SamplingMode(solver="dpmpp_2m"),
    }
    whole, _ = sample(comfy, tiny, NOISE, TABLE, prompt(0.5), **settings)
    apart = relative(whole, in_two(comfy, tiny, 4, **settings))
    assert TOLERANCE < apart < 0.05


def test_a_part_that_cannot_be_is_refused(comfy, tiny):
    def refused(match: str, sigmas: torch.Tensor, **settings) -> None:
        with pytest.raises(MixGRPOError, match=match) as refusal:
            sample(comfy, tiny, NOISE, sigmas, prompt(0.5), **settings)
        assert "\n" not in str(refusal.value)

    refused(
        "so the members of a group have parted .*; turn shared_noise off", TABLE[3:], **SHARED, window=Window(2, 3), first_step=3
    )
    refused("a ratio of 0.4 shortens all steps after the window, but", TABLE[:7], mode=FLASH)
    refused(r"a window of 3 from step 6 does not fit a table of 8 steps", TABLE[3:], window=Window(6, 3), first_step=3)
    refused("first step of a table is counted from 0, got -1", TABLE, first_step=-1)
    refused("sigma 0 is 14.6", torch.tensor([14.6, 3.0, 0.0]))


# masks, batch_index, batches, threads


@pytest.mark.parametrize("solver", ["euler", "heun", "dpmpp_2m"])
@pytest.mark.parametrize("dynamics", SDE_DYNAMICS)
def test_a_mask_keeps_its_region(comfy, tiny, dynamics, solver):
    mask = torch.zeros(6, 1, 4, 4)
    mask[..., 2:] = 1
    drawn, run = sample(
        comfy, tiny, NOISE, TABLE, prompt(0.5), PICTURE, mask=mask, **SHARED, eta=0.5, mode=SamplingMode(dynamics, solver=solver)
    )
    assert run.prefix == "mask" and relative(PICTURE[..., :2], drawn[..., :2]) < TOLERANCE
    assert relative(drawn[0, ..., 2:], drawn[1, ..., 2:]) > 0.001


def test_a_mask_without_noise_is_comfyuis(comfy, tiny):
    mask = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)).round()
    ours, _ = sample(comfy, tiny, NOISE, TABLE, prompt(0.5), PICTURE, mask=mask, eta=0.0)
    assert torch.equal(ours, stock(comfy, tiny, NOISE, TABLE, prompt(0.5), "euler", PICTURE, mask=mask))
    shared, _ = sample(comfy, tiny, NOISE, TABLE, prompt(0.5), the_first(PICTURE), mask=mask, eta=0.0, **SHARED)
    one_noise = stock(comfy, tiny, the_first(NOISE), TABLE, prompt(0.5), "euler", the_first(PICTURE), mask=mask)
    assert torch.equal(shared, one_noise) and relative(shared[0], shared[1]) > 0.001, "the rows' masks differ"


@pytest.mark.parametrize(
    "mode", [SamplingMode(), SamplingMode("precise", solver="heun"), SamplingMode("cps", solver_after="dpmpp_3m", ratio=0.5)]
)
@pytest.mark.parametrize("shared", [True, False], ids=["shared noise", "own noise"])
def test_a_group_alone_is_the_group_in_its_batch(graph, mode, shared):
    settings = {
        "group_size": 2,
        "shared_noise": shared,
        "window_start": 2,
        "window_size": 2,
        "mode": mode,
        "eta": 0.6,
        "cfg": 2.0,
    }
    whole, _, _ = draw(graph, empty(3), **settings)
    for group in range(3):
        alone, _, summary = draw(graph, empty(1, batch_index=[group]), **settings)
        assert summary["samples"] == [2 * group, 2 * group + 1]
        assert relative(whole["samples"][2 * group : 2 * group + 2], alone["samples"]) < TOLERANCE


@pytest.mark.parametrize("mode", [SamplingMode(), SamplingMode("dance_sde", solver="dpmpp_3m")])
def test_threads_make_no_difference(graph, mode):
    threads, drawn = torch.get_num_threads(), []
    try:
        for number in (1, 2, 1):
            torch.set_num_threads(number)
            drawn.append(draw(graph, empty(2), group_size=3, window_start=2, eta=0.3, mode=mode)[0]["samples"])
    finally:
        torch.set_num_threads(threads)
    assert relative(drawn[0], drawn[1]) < TOLERANCE
    assert torch.equal(drawn[0], drawn[2])  # and the same layout, threads and batch give the same bits


# other latents


@pytest.mark.parametrize("solver", SOLVERS)
def test_video_latents(comfy, solver):
    """Five axes, in the all-in-one node and as SAMPLER; without noise ComfyUI's own."""
    from mixgrpo.nodes.sampler import FlowSampler

    video = tiny_model(comfy, dimensions=3)
    latent = {"samples": torch.zeros(2, 16, 3, 4, 4)}
    mode = SamplingMode(solver=solver)

    def all_in_one(**widgets):
        return FlowSampler.execute(
            video, prompt(0.5), prompt(-0.5), latent, seed=3, steps=8, schedule="shift", shift=3.0, cfg=1.0, group_size=3,
            eta=0.7, window_start=1, window_size=2, mode=mode, **{"shared_noise": False} | widgets,
        ).result  # fmt: skip

    drawn, trajectory = all_in_one()
    noise = initial_noise(3, (6, 16, 3, 4, 4))
    samples, _ = sample(comfy, video, noise, TABLE, prompt(0.5), group_size=3, mode=mode)
    assert torch.equal(drawn["samples"], samples) and len(trajectory.states) == 3
    assert all_in_one(shared_noise=True)[0]["samples"].shape == (6, 16, 3, 4, 4)
    if solver in ("euler", "heun"):
        still, _ = sample(comfy, video, noise, TABLE, prompt(0.5), eta=0.0, mode=mode)
        assert torch.equal(still, stock(comfy, video, noise, TABLE, prompt(0.5), solver))


@pytest.mark.parametrize("shared", [True, False], ids=["shared noise", "own noise"])
def test_nested_latents_are_several_kinds_at_once(comfy, tiny, shared):
    """Packed by ComfyUI into one axis before they reach the sampler."""
    from comfy.nested_tensor import NestedTensor

    parts = [initial_noise(3, (6, 16, 2, 4, 4)), initial_noise(4, (6, 16, 5))]
    nothing = NestedTensor([torch.zeros_like(part) for part in parts])
    settings = {"group_size": 3, "shared_noise": shared}
    samples, run = sample(comfy, tiny, NestedTensor(parts), TABLE, prompt(0.5), nothing, **settings)
    assert [part.shape for part in samples.unbind()] == [part.shape for part in parts]
    assert run.prefix == ("used" if shared else "not shared") and run.trajectory.log_probs.shape == (2, 6)
    for part in samples.unbind():
        assert torch.isfinite(part).all() and relative(part[0], part[1]) > 0.001
    still, _ = sample(comfy, tiny, NestedTensor(parts), TABLE, prompt(0.5), nothing, eta=0.0)
    theirs = stock(comfy, tiny, NestedTensor(parts), TABLE, prompt(0.5), "euler", nothing)
    assert all(torch.equal(one, other) for one, other in zip(still.unbind(), theirs.unbind(), strict=True))


# LoRA, hooks, ControlNet


def test_a_lora_and_hooks_act_as_under_comfyuis_sampler(comfy, tiny):
    hooks = comfy.hooks.create_hook_lora(tiny_lora(), strength_model=1.0, strength_clip=0.0)
    frames = comfy.hooks.HookKeyframeGroup()
    frames.add(comfy.hooks.HookKeyframe(strength=1.0, start_percent=0.0))
    frames.add(comfy.hooks.HookKeyframe(strength=0.2, start_percent=0.5))
    hooks.set_keyframes_on_hooks(frames)
    hooked = comfy.hooks.set_hooks_for_conditioning(prompt(0.5), hooks)
    plain, _ = sample(comfy, tiny, NOISE, TABLE, prompt(0.5), eta=0.0)
    for model, positive in ((with_lora(comfy, tiny), prompt(0.5)), (tiny, hooked)):
        ours, _ = sample(comfy, model, NOISE, TABLE, positive, eta=0.0, cfg=2.0)
        assert torch.equal(ours, stock(comfy, model, NOISE, TABLE, positive, "euler", cfg=2.0))
        assert relative(plain, ours) > 0.01
        shared, run = sample(comfy, model, NOISE, TABLE, positive, cfg=2.0, **SHARED)
        full, _ = sample(comfy, model, the_first(NOISE), TABLE, positive, cfg=2.0, group_size=3)
        assert run.prefix == "used" and relative(shared, full) < TOLERANCE
    assert torch.equal(sample(comfy, tiny, NOISE, TABLE, prompt(0.5), eta=0.0)[0], plain)


def test_control_belongs_to_rows(comfy, tiny):
    import comfy.controlnet

    class Control(comfy.controlnet.ControlBase):
        """Tells every row of the batch something else."""

        def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
            assert len(x_noisy) == 6 * batched_number, "control saw fewer rows than the batch has"
            return {"output": [torch.arange(float(len(x_noisy))) / 5]}

        def get_models(self):
            return []

        def copy(self):
            return self

    controlled = prompt(0.5, control=Control(), control_apply_to_uncond=False)
    ours, run = sample(comfy, tiny, NOISE, TABLE, controlled, eta=0.0, **SHARED)
    assert torch.equal(ours, stock(comfy, tiny, the_first(NOISE), TABLE, controlled, "euler"))
    assert run.prefix == "control" and run.rows == 6 * 8
    drawn, run = sample(comfy, tiny, NOISE, TABLE, controlled, **SHARED)
    assert run.prefix == "control" and torch.isfinite(drawn).all()


# previews, interrupts


@pytest.mark.parametrize(("solver", "calls"), [("euler", 3), ("heun", 5)])
def test_an_interrupt_takes_effect_at_the_next_model_call(comfy, tiny, solver, calls):
    """Heun's step is left between its two calls."""
    import comfy.model_management

    model, rows = tiny.clone(), []

    def interrupting(apply, options):
        rows.append(len(options["input"]))
        velocity = apply(options["input"], options["timestep"], **options["c"])
        if len(rows) == calls:
            comfy.model_management.interrupt_current_processing()
        return velocity

    model.set_model_unet_function_wrapper(interrupting)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(comfy, model, NOISE, TABLE, prompt(0.5), mode=SamplingMode(solver=solver), window=Window(0, 0))
    assert len(rows) == calls
    assert not comfy.model_management.processing_interrupted(), "the interrupt was not taken"


def test_previews_show_the_prediction_of_every_sample(comfy, tiny):
    seen = []
    sample(
        comfy, tiny, NOISE, TABLE, prompt(0.5), callback=lambda i, x0, x, total: seen.append((i, x0.clone(), x.clone())), **SHARED
    )
    assert [i for i, _, _ in seen] == list(range(8)) and all(len(x0) == 6 for _, x0, _ in seen)
    assert torch.equal(seen[0][1][0], seen[0][1][2]) and not torch.equal(seen[0][1][0], seen[0][1][3])
    assert not torch.equal(seen[7][1][0], seen[7][1][1])


# what cannot be sampled


def other_kinds(comfy) -> dict:
    """The conventions that are not flow matching, by ComfyUI's own name."""
    import comfy.model_sampling as sampling

    pairs = {
        "ModelSamplingDiscrete + EPS": (sampling.ModelSamplingDiscrete, sampling.EPS),
        "ModelSamplingDiscrete + V_PREDICTION": (sampling.ModelSamplingDiscrete, sampling.V_PREDICTION),
        "ModelSamplingContinuousEDM + EDM": (sampling.ModelSamplingContinuousEDM, sampling.EDM),
        "ModelSamplingCosmosRFlow + .*COSMOS_RFLOW": (sampling.ModelSamplingCosmosRFlow, sampling.COSMOS_RFLOW),
        "ModelSamplingDiscreteFlow + .*X0": (sampling.ModelSamplingDiscreteFlow, sampling.X0),
    }
    return {name.replace(" + ", r" \+ "): type("Patched", parents, {}) for name, parents in pairs.items()}


def test_models_that_are_no_flows_are_refused_by_name_in_both_nodes(comfy, graph):
    for words, kind in other_kinds(comfy).items():
        model = graph.model.clone()
        config = SimpleNamespace(sampling_settings={}, unet_config={})
        model.add_object_patch("model_sampling", kind(config))
        with pytest.raises(MixGRPOError, match=f"this MODEL is none: its sampling is .*{words}.*; use a model such as"):
            draw(graph, model=model)
        with pytest.raises(MixGRPOError, match=f"this MODEL is none: its sampling is .*{words}"):
            sample(comfy, model, initial_noise(3, (2, 16, 8, 8)), TABLE, graph.encode[CAPTION], negative=graph.encode[""])


@pytest.mark.parametrize("solver", ["euler", "heun"])
@pytest.mark.parametrize(("row", "sigma", "step"), [(4, TABLE[6], 6), (0, TABLE[2], 2)])
def test_nan_is_named_with_its_step_and_sample(comfy, tiny, solver, row, sigma, step):
    model = tiny.clone()

    def breaking(apply, options):
        velocity = apply(options["input"], options["timestep"], **options["c"])
        if options["timestep"][0] == sigma:
            velocity[row] = float("nan")
        return velocity

    model.set_model_unet_function_wrapper(breaking)
    told = f"NaN or infinity at step {step - (solver == 'heun')} for sample {100 + row} .*1 of 6 rows.*--force-fp32"
    with pytest.raises(MixGRPOError, match=told):
        sample(
            comfy,
            model,
            NOISE,
            TABLE,
            prompt(0.5),
            mode=SamplingMode(solver=solver),
            window=Window(0, 0),
            sample_ids=range(100, 106),
        )


def test_a_conditioning_that_does_not_fit_the_batch_is_refused(comfy, tiny):
    """ComfyUI would repeat the rows in an order that is not the groups'."""
    words = "the positive conditioning holds 2 prompts for a batch of 6 latents; give one prompt, or one for each latent, or use"
    with pytest.raises(MixGRPOError, match=words):
        sample(comfy, tiny, NOISE, TABLE, prompt(0.5, 0.6), **SHARED)
    assert torch.isfinite(sample(comfy, tiny, NOISE, TABLE, prompt(*[0.5] * 3, *[0.6] * 3), **SHARED)[0]).all()


def test_an_empty_or_single_entry_table_leaves_the_latent(comfy, tiny):
    rows, hook = model_rows(tiny)
    try:
        for sigmas in (TABLE[:0], TABLE[3:4]):
            drawn, run = sample(comfy, tiny, torch.zeros_like(PICTURE), sigmas, prompt(0.5), PICTURE)
            assert relative(PICTURE, drawn) < TOLERANCE and run is None
    finally:
        hook.remove()
    assert not rows
