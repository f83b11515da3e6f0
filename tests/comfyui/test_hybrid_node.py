"""Hybrid Model: base at share 0, trained at share 1, bit for bit, and in between each on its own side of the boundary."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from starter_graph import CAPTION, draw, empty
from tiny_flow import prompt, stock, tiny_lora, tiny_model, with_lora

from mixgrpo.backend.errors import MixGRPOError
from mixgrpo.backend.flow.hybrid import hybrid_boundary
from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.flow.sigmas import shifted_sigmas

TABLE = shifted_sigmas(8, 3.0).float()


@pytest.fixture(scope="module")
def lora_file(graph, tmp_path_factory) -> str:
    """A LoRA for two of the starter's layers, in ComfyUI's own keys."""
    generator, tensors = torch.Generator().manual_seed(4), {}
    for name in ("joint_blocks.0.x_block.attn.proj", "joint_blocks.1.x_block.mlp.fc1"):
        weight = graph.model.model.diffusion_model.get_parameter(f"{name}.weight")
        for part, shape in (("lora_up", (weight.shape[0], 2)), ("lora_down", (2, weight.shape[1]))):
            tensors[f"diffusion_model.{name}.{part}.weight"] = 0.3 * torch.randn(shape, generator=generator)
        tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(2.0)
    path = tmp_path_factory.mktemp("loras") / "trained.safetensors"
    save_file(tensors, path)
    return str(path)


@pytest.fixture(scope="module")
def trained(comfy, graph, lora_file):
    """The starter with that LoRA, as the stock loader returns it."""
    return comfy.sd.load_lora_for_models(graph.model, None, load_file(lora_file), 1.0, 0.0)[0]


@pytest.fixture(scope="module")
def apart(comfy, graph, lora_file):
    """The starter loaded once more, with that LoRA in its weights."""
    from mixgrpo.nodes.starter import load_starter_objects

    model = load_starter_objects(graph.folder)[0]
    model = comfy.sd.load_lora_for_models(model, None, load_file(lora_file), 1.0, 0.0)[0]
    comfy.model_management.load_models_gpu([model])
    return model


def hybrid(trained, base, share: float, sigmas=TABLE):
    from mixgrpo.nodes.hybrid import HybridModel

    output = HybridModel.execute(trained, base, sigmas, share)
    return output.result[0], output.ui["mixgrpo_hybrid"][0]


def latents(graph, model, **widgets) -> torch.Tensor:
    """MixGRPO Sampler with a window, two prompts' worth of rows and guidance."""
    settings = {"cfg": 3.0, "group_size": 2, "window_start": 1, "window_size": 4} | widgets
    return draw(graph, empty(2), model=model, **settings)[0]["samples"]


def test_share_0_is_the_base_and_share_1_the_trained_model_bit_for_bit(graph, trained):
    from mixgrpo.nodes.hybrid import hybrid_model

    base, tuned = latents(graph, graph.model), latents(graph, trained)
    assert (base - tuned).norm() > 0.01 * base.norm()
    assert torch.equal(latents(graph, hybrid(trained, graph.model, 0.0)[0]), base)
    assert torch.equal(latents(graph, hybrid(trained, graph.model, 1.0)[0]), tuned)
    # and so is the switch itself, when every sigma is on one side of it
    assert torch.equal(latents(graph, hybrid_model(trained, graph.model, 2.0)), base)
    assert torch.equal(latents(graph, hybrid_model(trained, graph.model, -1.0)), tuned)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("name", ["euler", "heun", "dpm_2", "dpmpp_2m", "euler_ancestral", "uni_pc"])
def test_each_model_serves_its_side_under_every_sampler(comfy, graph, trained, apart, name, share):
    """Against ComfyUI's sampler with a switch between the denoisers of two models that share nothing."""
    noise, told = initial_noise(5, (2, 16, 8, 8)), (graph.encode[CAPTION], graph.encode[""])
    model, summary = hybrid(trained, graph.model, share)
    samples = run(comfy, model, noise, told, name)
    boundary = hybrid_boundary(TABLE, share)
    assert summary == {"steps": 8, "trained_steps": round(8 * share), "boundary": boundary}
    assert torch.equal(samples, run(comfy, two_models(graph.model, apart, boundary), noise, told, name))
    for other in (graph.model, trained):
        assert not torch.equal(samples, run(comfy, other, noise, told, name))


def run(comfy, model, noise, told, name) -> torch.Tensor:
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(*told)
    guider.set_cfg(2.0)
    return guider.sample(noise, torch.zeros_like(noise), comfy.samplers.sampler_object(name), TABLE, disable_pbar=True, seed=5)


def two_models(base, apart, boundary: float):
    """The base MODEL, with the separate one behind its ``apply_model`` above the boundary."""

    def switch(apply, options):
        use = apart.model.apply_model if options["timestep"].max() > boundary else apply
        return use(options["input"], options["timestep"], **options["c"])

    model = base.clone()
    model.set_model_unet_function_wrapper(switch)
    return model


def test_a_hybrid_leaves_both_models_as_they_were(graph, trained):
    model, _ = hybrid(trained, graph.model, 0.5)
    before = [latents(graph, one) for one in (graph.model, trained, model)]
    for _ in range(2):
        after = [latents(graph, one) for one in (model, graph.model, model, trained)]
        assert torch.equal(after[0], before[2]) and torch.equal(after[2], before[2])
        assert torch.equal(after[1], before[0]) and torch.equal(after[3], before[1])


def test_weights_are_changed_once_a_crossing(comfy):
    from comfy.patcher_extension import CallbacksMP

    base = tiny_model(comfy)
    trained, loads = with_lora(comfy, base), []
    for name, model in (("base", base), ("trained", trained)):
        model.add_callback(CallbacksMP.ON_LOAD, lambda *given, name=name: loads.append(name))
    model, _ = hybrid(trained, base, 0.5)
    stock(comfy, model, initial_noise(3, (2, 16, 4, 4)), TABLE, prompt(0.5), "euler")
    assert loads == ["trained", "base"]


def test_two_models_loaded_apart_do_the_same(comfy):
    base, other = tiny_model(comfy), tiny_model(comfy)
    noise = initial_noise(3, (2, 16, 4, 4))
    for name in ("euler", "heun"):
        one, two = (
            stock(comfy, hybrid(trained, base, 0.5)[0], noise, TABLE, prompt(0.5), name, cfg=2.0)
            for trained in (with_lora(comfy, base), with_lora(comfy, other))
        )
        assert torch.equal(one, two)
    assert base.model.current_patcher is None and other.model.current_patcher is None


def test_what_cannot_be_a_hybrid_is_refused(comfy, graph, trained):
    with pytest.raises(MixGRPOError, match="share of the steps lies between 0 and 1, got 1.5"):
        hybrid(trained, graph.model, 1.5)
    with pytest.raises(MixGRPOError, match="trained MODEL is of the kind Tiny and the base MODEL of the kind SD3; connect"):
        hybrid(tiny_model(comfy), graph.model, 0.5)
    tiny = tiny_model(comfy)
    hooks = comfy.hooks.create_hook_lora(tiny_lora(), strength_model=1.0, strength_clip=0.0)
    hooked = comfy.hooks.set_hooks_for_conditioning(prompt(0.5), hooks)
    with pytest.raises(MixGRPOError, match="changes weights while it samples, and so do the hooks in this conditioning; use one"):
        stock(comfy, hybrid(with_lora(comfy, tiny), tiny, 0.5)[0], initial_noise(3, (2, 16, 4, 4)), TABLE, hooked, "euler")
    with pytest.raises(MixGRPOError, match="sigmas must fall"):
        hybrid(trained, graph.model, 0.5, torch.tensor([1.0, 1.0, 0.0]))
