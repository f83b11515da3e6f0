"""The sampler nodes against ComfyUI's own sampler and against the trainer's rollout, in this process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from starter_graph import CAPTION, OTHER, TOLERANCE, draw, empty, relative

from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.flow.rollout import Trajectory
from mixgrpo.backend.specs import SamplingSpec, TrainSpec
from mixgrpo.backend.starter.load import load_starter
from mixgrpo.backend.train import trainer as training
from mixgrpo.backend.train.ranks import Ranks


def both(graph: SimpleNamespace) -> list:
    """A conditioning of two prompts in one batch."""
    (first, extra), (second, more) = graph.encode[CAPTION][0], graph.encode[OTHER][0]
    pooled = torch.cat([extra["pooled_output"], more["pooled_output"]])
    return [[torch.cat([first, second]), {"pooled_output": pooled}]]


def euler(comfy, graph, rows: int, cfg: float, seed: int, steps: int = 8, noise=None) -> torch.Tensor:
    """KSampler's euler with the scheduler 'simple'."""
    latent = torch.zeros(rows, 16, 8, 8)
    noise = comfy.sample.prepare_noise(latent, seed) if noise is None else noise
    return comfy.sample.sample(
        graph.model, noise, steps, cfg, "euler", "simple", graph.encode[CAPTION], graph.encode[""], latent,
        seed=seed, disable_pbar=True,
    )  # fmt: skip


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("off", [{"eta": 0.0}, {"window_size": 0}], ids=["eta 0", "empty window"])
@pytest.mark.parametrize("schedule", ["shift", "model"])
def test_without_noise_it_is_comfyuis_euler_bit_for_bit(comfy, graph, cfg, off, schedule):
    latents, trajectory, _ = draw(graph, empty(3), cfg=cfg, schedule=schedule, **off)
    assert torch.equal(latents["samples"], euler(comfy, graph, 3, cfg, 7))
    assert not trajectory.states and not len(trajectory.log_probs)
    own, _, _ = draw(graph, empty(1), cfg=cfg, schedule=schedule, group_size=3, shared_noise=False, **off)
    assert torch.equal(own["samples"], latents["samples"])


def test_the_sampler_object_is_the_same_sampler(comfy, graph):
    from mixgrpo.nodes.sampler import FlowSamplerObject

    def run(**widgets):
        settings = {"group_size": 4, "shared_noise": False, "eta": 0.7, "window_start": 1, "window_size": 2} | widgets
        sampler = FlowSamplerObject.execute(**settings).result[0]
        guider = comfy.samplers.CFGGuider(graph.model)
        guider.set_conds(graph.encode[CAPTION], graph.encode[""])
        guider.set_cfg(2.0)
        noise = initial_noise(7, (4, 16, 8, 8))
        table = sampling_table(comfy, graph)
        return guider.sample(noise, torch.zeros_like(noise), sampler, table, disable_pbar=True, seed=7)

    assert torch.equal(run(eta=0.0), euler(comfy, graph, 4, 2.0, 7))
    same = {"group_size": 4, "cfg": 2.0, "schedule": "model", "window_start": 1, "window_size": 2}
    assert torch.equal(run(), draw(graph, shared_noise=False, **same)[0]["samples"])
    assert torch.equal(run(shared_noise=True), draw(graph, **same)[0]["samples"])
    from mixgrpo.nodes.checks import GraphError

    with pytest.raises(GraphError, match="a batch of 4 latents is not whole groups of 3"):
        run(group_size=3)


@pytest.mark.parametrize("kind", ["BasicGuider", "DualCFGGuider"])
def test_other_guiders_share_the_prefix_too(comfy, graph, kind):
    """The first rows of a group stand for it whoever guides, and computing all of them makes no difference."""
    from comfy_extras import nodes_custom_sampler as stock

    from mixgrpo.backend.flow.window import Window
    from mixgrpo.nodes import sampling

    model, positive, other, negative = graph.model, *(graph.encode[text] for text in (CAPTION, OTHER, ""))
    arguments = (model, positive) if kind == "BasicGuider" else (model, positive, other, negative, 2.0, 3.0, "regular")
    guider = getattr(stock, kind).execute(*arguments).result[0]
    settings = sampling.GroupSettings(3, True, 0.7, Window(2, 2))
    noise = initial_noise(3, (6, 16, 8, 8))
    sigmas, rows = sampling_table(comfy, graph), []
    hook = model.model.diffusion_model.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    try:
        sampler = comfy.samplers.KSAMPLER(sampling.sample_groups, {"settings": settings})
        samples = guider.sample(noise, torch.zeros_like(noise), sampler, sigmas, disable_pbar=True, seed=3)
        mask = torch.ones(1, 1, 8, 8)  # keeps nothing, but belongs to rows of the full batch
        full = guider.sample(noise, torch.zeros_like(noise), sampler, sigmas, denoise_mask=mask, disable_pbar=True, seed=3)
    finally:
        hook.remove()
    prompts = 1 if kind == "BasicGuider" else 3
    assert rows == [prompts * count for count in [2, 2, 2, 6, 6, 6, 6, 6] + [6] * 8]
    assert relative(samples, full) < TOLERANCE


def sampling_table(comfy, graph) -> torch.Tensor:
    return comfy.samplers.calculate_sigmas(graph.model.get_model_object("model_sampling"), "simple", 8)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("schedule", "shift"), [("shift", 3.0), ("shift", 1.4), ("dynamic shift", "dynamic")])
def test_the_sigma_table_is_the_trainers(comfy, schedule, shift, size):
    from mixgrpo.nodes.schedule import FlowSigmas

    spec = SamplingSpec(steps=11, shift=shift, width=size, height=size)
    widgets = {"steps": 11, "schedule": schedule, "shift": 5.0 if shift == "dynamic" else shift}
    latent = {"samples": torch.zeros(1, 16, size // 8, size // 8)}
    (sigmas,) = FlowSigmas.execute(**widgets, latent_image=latent).result
    assert torch.equal(sigmas, training.sigma_table(spec))


@pytest.mark.parametrize("schedule", ["dynamic shift", "model", "karras"])
def test_a_table_without_what_it_needs_is_refused(comfy, schedule):
    from mixgrpo.backend.flow.sigmas import SigmaError
    from mixgrpo.nodes.schedule import FlowSigmas

    with pytest.raises(SigmaError, match=f"the schedule '{schedule}' .*connect|there is no schedule 'karras'"):
        FlowSigmas.execute(8, schedule, 3.0)


class _FixedNoise(training.Trainer):
    """The trainer with the graph's initial noise, whose seed a graph does not derive from a prompt's place."""

    def _initial_noise(self, places: range) -> torch.Tensor:
        groups, size = len(places), self.spec.group_size
        rows = groups if self.spec.sampling.shared_noise else groups * size
        return initial_noise(self.spec.seed, (rows, *self.latent_shape))


def trained_rollout(graph, monkeypatch, prompts, guidance, shared, window) -> Trajectory:
    """What the trainer draws in its first iteration, with the graph's initial noise."""
    monkeypatch.setattr(training, "load_model", lambda spec, device: load_starter(device, folder=graph.folder))
    monkeypatch.setattr(training, "prompt_rows", lambda seed, iteration, count, per_iteration: list(range(count)))
    spec = TrainSpec.model_validate({
        "prompts": prompts, "prompts_per_iteration": len(prompts), "group_size": 4, "seed": 11,
        "rewards": [{"scorer": "jpeg_compressibility"}],
        "sampling": {"steps": 9, "guidance": guidance, "shared_noise": shared, "window": {"start": window[0], "size": window[1]}},
    })  # fmt: skip
    return _FixedNoise(spec, Ranks(0, 1, torch.device("cpu"))).collect().trajectory


@pytest.mark.parametrize("window", [(0, 3), (2, 4)])
@pytest.mark.parametrize("shared", [True, False], ids=["shared noise", "own noise"])
@pytest.mark.parametrize(("prompts", "guidance"), [([CAPTION], 1.0), ([CAPTION], 3.0), ([CAPTION, OTHER], 2.0)])
def test_the_graph_samples_what_the_trainer_trains_on(graph, monkeypatch, prompts, guidance, shared, window):
    ours = trained_rollout(graph, monkeypatch, prompts, guidance, shared, window)
    positive = both(graph) if len(prompts) == 2 else graph.encode[CAPTION]
    latents, theirs, summary = draw(
        graph, empty(len(prompts)), positive, seed=11, steps=9, cfg=guidance, group_size=4, shared_noise=shared,
        window_start=window[0], window_size=window[1],
    )  # fmt: skip
    assert torch.equal(ours.sigmas, theirs.sigmas) and ours.stds == theirs.stds == summary["std"]
    assert len(ours.states) == len(theirs.states) == window[1] + 1
    assert ours.shared == shared and theirs.shared == (shared and len(prompts) == 1), (
        "ComfyUI gives prompts to rows, not to groups"
    )
    for mine, other in zip([*ours.states, *ours.means, ours.final], [*theirs.states, *theirs.means, theirs.final], strict=True):
        assert relative(mine.repeat_interleave(len(other) // len(mine), 0), other) < TOLERANCE
    assert relative(ours.log_probs, theirs.log_probs) < TOLERANCE
    assert torch.tensor(summary["log_probs"]).equal(theirs.log_probs)
    assert relative(graph.model.get_model_object("latent_format").process_out(ours.final), latents["samples"]) < TOLERANCE


def test_a_shared_prefix_is_computed_once(graph):
    rows = []
    hook = graph.model.model.diffusion_model.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    try:
        draw(graph, group_size=5, window_start=2, window_size=3)
        shared, rows[:] = list(rows), []
        draw(graph, group_size=5, window_start=2, window_size=3, shared_noise=False)
    finally:
        hook.remove()
    assert shared == [1, 1, 1, 5, 5, 5, 5, 5] and rows == [5] * 8


def test_a_mask_keeps_its_region_and_gives_up_the_shared_prefix(comfy, graph):
    picture = torch.rand(1, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., 4:] = 1
    latents, trajectory, _ = draw(graph, {"samples": picture, "noise_mask": mask}, group_size=3, window_start=2)
    assert relative(picture[..., :4].expand(3, -1, -1, -1), latents["samples"][..., :4]) < 1e-5
    parts = latents["samples"][..., 4:]
    assert relative(parts[0], parts[1]) > 0.01
    assert not trajectory.shared and [len(state) for state in trajectory.states] == [3, 3, 3, 3]
    assert torch.equal(trajectory.states[0][0], trajectory.states[0][2]), "they share their noise, though not their row"


def test_a_sample_alone_is_the_sample_in_its_batch(graph):
    whole, _, _ = draw(graph, empty(3), group_size=2, shared_noise=False)
    alone, _, summary = draw(graph, empty(1, batch_index=[2]), group_size=2, shared_noise=False)
    assert relative(whole["samples"][4:], alone["samples"]) < TOLERANCE
    assert alone["batch_index"] == summary["samples"] == [4, 5]
    shared, _, _ = draw(graph, empty(3), group_size=2)
    alone, _, _ = draw(graph, empty(1, batch_index=[2]), group_size=2)
    assert relative(shared["samples"][4:], alone["samples"]) < TOLERANCE


def test_nothing_given_is_changed(graph):
    latent = empty(2, noise_mask=torch.ones(2, 1, 8, 8), batch_index=[3, 5])
    before = {key: list(value) if isinstance(value, list) else value.clone() for key, value in latent.items()}
    options = str(graph.model.model_options)
    result, _, _ = draw(graph, latent, group_size=2)
    assert set(latent) == set(before) and latent["batch_index"] == before["batch_index"]
    assert all(torch.equal(latent[key], before[key]) for key in ("samples", "noise_mask"))
    assert str(graph.model.model_options) == options
    assert len(result["noise_mask"]) == len(result["samples"]) == 4


def test_previews_and_interrupt_come_with_every_step(comfy, graph, monkeypatch):
    import comfy.model_management
    import latent_preview

    seen = []

    def callback(step, denoised, x, total):
        seen.append((step, len(denoised), total))
        if step == 2:
            comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(latent_preview, "prepare_callback", lambda model, steps: callback)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        draw(graph, group_size=4, window_start=1)
    assert seen == [(0, 4, 8), (1, 4, 8), (2, 4, 8)]


def test_what_a_trainer_cannot_see_is_named(comfy, graph, caplog):
    from mixgrpo.nodes.checks import unseen_by_trainer

    assert draw(graph)[2]["unseen"] == []
    model = graph.model.clone()
    model.add_patches({"diffusion_model.x_embedder.proj.bias": (torch.zeros(192),)})
    model.add_object_patch("model_sampling", graph.model.get_model_object("model_sampling"))
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"])
    model.set_model_attn1_patch(lambda q, k, v, extra: (q, k, v))
    prompt = [[states, extra | {"control": object()}] for states, extra in graph.encode[CAPTION]]
    named = unseen_by_trainer(model, prompt, graph.encode[""] * 2)
    expected = [
        "1 patched weights (a LoRA",
        "changed model_sampling (shift 3)",
        "sampler post cfg function",
        "patches on the model",
    ]
    for words in (*expected, "a ControlNet", "combined prompts"):
        assert any(words in part for part in named), (words, named)
    lora = graph.model.clone()
    lora.add_patches({"diffusion_model.x_embedder.proj.bias": ("diff", (torch.zeros(192),))})
    summary = draw(graph, model=lora)[2]
    assert summary["unseen"] == ["1 patched weights (a LoRA, for example)"]
    assert "which a trainer that loads the base model does not see" in caplog.text


def broken_at(call: int):
    """A wrapper around the diffusion model that returns NaN from that call on."""
    calls = []

    def wrapper(apply, options):
        calls.append(None)
        velocity = apply(options["input"], options["timestep"], **options["c"])
        return velocity * float("nan") if len(calls) > call else velocity

    return wrapper


def refusals(comfy, graph) -> dict:
    """Name -> (arguments of the node, the sentence)."""
    import comfy.model_sampling
    from comfy.nested_tensor import NestedTensor

    class Discrete(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):
        pass

    eps = graph.model.clone()
    eps.add_object_patch("model_sampling", Discrete(eps.model.model_config))
    three = [[graph.encode[CAPTION][0][0].repeat(3, 1, 1), {}]]
    broken = graph.model.clone()
    broken.set_model_unet_function_wrapper(broken_at(3))
    return {
        "not a flow": ({"model": eps}, r"this MODEL is none: its sampling is ModelSamplingDiscrete \+ EPS; use a model such as"),
        "no conditioning": ({"negative": []}, "the negative conditioning is empty; connect a CLIP Text Encode"),
        "batches": ({"positive": three, "latent": empty(2)}, "holds 3 prompts for 2 latents; give one prompt, or one for each"),
        "window": ({"window_start": 6}, r"a window of 3 from step 6 does not fit a table of 8 steps.*at most 7"),
        "eta": ({"eta": 9.0}, "eta 9.0 is too large for step 0"),
        "schedule": ({"schedule": "karras"}, "there is no schedule 'karras'; there are: shift, dynamic shift, model"),
        "sigmas": ({"sigmas": torch.tensor([1.0, 0.5, 0.5, 0.0])}, "sigmas must fall at every step"),
        "no steps": ({"sigmas": torch.tensor([])}, "at least two entries"),
        "NaN": ({"model": broken}, r"the model returned NaN or infinity at step 3 for sample 0 \(sigma .*--force-fp32"),
        "nested": ({"latent": {"samples": NestedTensor([torch.zeros(1, 16, 8, 8)])}}, "this one holds several; use the SAMPLER"),
        "batch_index": ({"latent": empty(2, batch_index=[1])}, "batch_index names 1 rows, but the batch has 2"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "not a flow",
        "no conditioning",
        "batches",
        "window",
        "eta",
        "schedule",
        "sigmas",
        "no steps",
        "NaN",
        "nested",
        "batch_index",
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(comfy, graph, name):
    from mixgrpo.backend.errors import MixGRPOError

    arguments, sentence = refusals(comfy, graph)[name]
    with pytest.raises(MixGRPOError, match=sentence) as refused:
        draw(graph, **arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "prompt", ["a (red:1.3) circle on a white background", "a (red) circle", r"a \(red\) circle", "a red embedding:x circle"]
)
def test_prompts_that_the_trainer_reads_differently_are_refused(graph, prompt):
    from mixgrpo.nodes.starter_clip import PromptError

    with pytest.raises(PromptError, match="the starter reads plain words"):
        graph.clip.tokenize(prompt)


def test_a_long_prompt_is_cut_where_the_trainer_cuts_it(graph, caplog):
    prompt = "a red circle " * 9 + "on a white background"
    conditions = load_starter(folder=graph.folder).encode([prompt])
    states, extra = graph.clip.encode_from_tokens_scheduled(graph.clip.tokenize(prompt))[0]
    assert relative(conditions["states"], states) < TOLERANCE
    assert relative(conditions["pooled"], extra["pooled_output"]) < TOLERANCE
    assert "reads the first 14 words" in caplog.text
