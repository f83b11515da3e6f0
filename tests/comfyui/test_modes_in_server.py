"""Sampling modes in a running ComfyUI, next to stock nodes: split tables, Heun, the plan, Hybrid Model with a LoRA file."""

from __future__ import annotations

import pytest
import torch
from graph_server import GraphError, GraphServer
from safetensors.torch import load_file, save_file
from starter_graph import TOLERANCE, relative
from test_pack_in_server import node, sampler, save, starter_graph

LINKS = {"model": ["starter", 0], "positive": ["positive", 0], "negative": ["negative", 0]}


def mode(**widgets) -> dict:
    default = {"dynamics": "flow_sde", "log_prob": "gaussian", "solver": "euler", "solver_after": "same", "history": "carry"}
    return node("MixGRPO_SamplingMode", **default | {"ratio": 1.0} | widgets)


def test_two_samplers_over_split_sigmas_are_one(server: GraphServer):
    """SplitSigmas inside the window; SamplerCustom without new noise, but with the seed, goes on where the first stopped."""
    groups = {"group_size": 2, "eta": 0.9, "window_start": 2, "window_size": 4, "mode": ["mode", 0]}

    def custom(sigmas: list, latent: list, name: str, new_noise: bool) -> dict:
        return node("SamplerCustom", add_noise=new_noise, noise_seed=5, cfg=2.0, sampler=[name, 0], sigmas=sigmas,
                    latent_image=latent, **LINKS)  # fmt: skip

    outputs = server.run(starter_graph(
        four=node("EmptySD3LatentImage", width=64, height=64, batch_size=4),
        mode=mode(dynamics="precise", solver="heun"),
        sigmas=node("MixGRPO_Sigmas", steps=8, schedule="shift", shift=3.0),
        split=node("SplitSigmas", sigmas=["sigmas", 0], step=4),
        first=node("MixGRPO_SamplerObject", shared_noise=True, **groups),
        second=node("MixGRPO_SamplerObject", shared_noise=False, first_step=4, **groups),
        whole=custom(["sigmas", 0], ["four", 0], "first", True),
        one=custom(["split", 0], ["four", 0], "first", True),
        two=custom(["split", 1], ["one", 0], "second", False),
        save_whole=save(["whole", 0]),
        save_two=save(["two", 0]),
    ))  # fmt: skip
    assert relative(server.latent(outputs, "save_whole"), server.latent(outputs, "save_two")) < TOLERANCE


def test_heun_is_the_stock_sampler_and_the_plan_is_kept(server: GraphServer):
    widgets = {"group_size": 4, "eta": 0.0, "window_start": 1, "window_size": 3, "mode": ["mode", 0], "cfg": 2.0}
    outputs = server.run(starter_graph(
        mode=mode(solver="heun"),
        sampler=sampler(shared_noise=False, **widgets),
        save=save(["sampler", 0]),
        four=node("EmptySD3LatentImage", width=64, height=64, batch_size=4),
        stock=node("KSampler", seed=5, steps=8, cfg=2.0, sampler_name="heun", scheduler="simple", denoise=1.0,
                   latent_image=["four", 0], **LINKS),
        save_stock=save(["stock", 0]),
        plan=node("MixGRPO_SamplingPlan", steps=8, shift=3.0, shared_noise=False, **widgets),
        text=node("PreviewAny", source=["plan", 0]),
    ))  # fmt: skip
    assert torch.equal(server.latent(outputs, "save"), server.latent(outputs, "save_stock"))
    ran, planned = outputs["sampler"]["mixgrpo_sampler"][0], outputs["plan"]["mixgrpo_plan"][0]
    assert ran["nfe"] == planned["nfe"] == 15 and ran["steps"] == planned["steps"]
    assert ran["rows"] == ran["rows_predicted"] == planned["rows"] == 2 * 4 * 15
    assert "15 model calls for a sample" in outputs["text"]["text"][0]


def test_flash_with_a_mask_says_why_a_group_did_not_share(server: GraphServer):
    outputs = server.run(starter_graph(
        mode=mode(solver_after="dpmpp_2m", ratio=0.4),
        hole=node("SolidMask", value=1.0, width=8, height=8),
        masked=node("SetLatentNoiseMask", samples=["latent", 0], mask=["hole", 0]),
        sampler=sampler(mode=["mode", 0], latent_image=["masked", 0], cfg=1.0, window_start=2),
        plain=sampler(mode=["mode", 0], cfg=1.0, window_start=2),
        save=save(["sampler", 0]), save_plain=save(["plain", 0]),
    ))  # fmt: skip
    masked, plain = (outputs[name]["mixgrpo_sampler"][0] for name in ("sampler", "plain"))
    assert masked["nfe"] == plain["nfe"] == 2 + 3 + 2 and len(plain["steps"]) == 7 == len(plain["sigmas"]) - 1
    assert (masked["shared_prefix"], plain["shared_prefix"]) == ("mask", "used")
    assert (masked["rows"], plain["rows"]) == (4 * 7, 3 + 4 * 4)
    assert relative(server.latent(outputs, "save"), server.latent(outputs, "save_plain")) < TOLERANCE


@pytest.fixture
def lora(server: GraphServer) -> str:
    """A LoRA file in ComfyUI's folder for the starter's first attention output."""
    weights = server.packs[0] / "backend" / "starter" / "weights" / "transformer" / "diffusion_pytorch_model.safetensors"
    width = load_file(weights)["transformer_blocks.0.attn.to_out.0.weight"].shape[0]
    layer, generator = "diffusion_model.joint_blocks.0.x_block.attn.proj", torch.Generator().manual_seed(4)
    tensors = {
        f"{layer}.lora_up.weight": 0.3 * torch.randn((width, 2), generator=generator),
        f"{layer}.lora_down.weight": 0.3 * torch.randn((2, width), generator=generator),
        f"{layer}.alpha": torch.tensor(2.0),
    }
    folder = server.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "hybrid_test.safetensors")
    return "hybrid_test.safetensors"


def test_a_hybrid_is_base_or_trained_at_its_ends_and_both_between(server: GraphServer, lora):
    def drawn(name: str, model: list) -> dict:
        links = LINKS | {"model": model, "latent_image": ["latent", 0]}
        widgets = {"seed": 5, "steps": 8, "cfg": 2.0, "sampler_name": "dpmpp_2m", "scheduler": "simple", "denoise": 1.0}
        return {name: node("KSampler", **links, **widgets), f"save_{name}": save([name, 0])}

    def hybrid(share: float) -> dict:
        return node("MixGRPO_HybridModel", trained=["lora", 0], base=["starter", 0], sigmas=["sigmas", 0], share=share)

    outputs = server.run(starter_graph(
        sigmas=node("BasicScheduler", model=["starter", 0], scheduler="simple", steps=8, denoise=1.0),
        lora=node("LoraLoaderModelOnly", model=["starter", 0], lora_name=lora, strength_model=1.0),
        none=hybrid(0.0), half=hybrid(0.5), all=hybrid(1.0),
        **drawn("base", ["starter", 0]), **drawn("trained", ["lora", 0]),
        **drawn("at_0", ["none", 0]), **drawn("at_half", ["half", 0]), **drawn("at_1", ["all", 0]),
        plain=sampler(model=["half", 0], eta=0.0), save_plain=save(["plain", 0]),
    ))  # fmt: skip
    base, trained, at_0, at_half, at_1 = (
        server.latent(outputs, f"save_{name}") for name in ("base", "trained", "at_0", "at_half", "at_1")
    )
    assert torch.equal(at_0, base) and torch.equal(at_1, trained)
    assert min(relative(at_half, base), relative(at_half, trained), relative(base, trained)) > 0.001
    assert outputs["half"]["mixgrpo_hybrid"][0] == {"steps": 8, "trained_steps": 4, "boundary": 0.75}


REFUSALS = {
    "dynamics": ({"dynamics": "ode"}, {}, "dynamics 'ode' does not exist; choose one of flow_sde|value_not_in_list"),
    "eta": ({"dynamics": "cps"}, {"eta": 1.2}, "eta 1.2 is too large for step 1 .* of cps"),
    "ratio": ({"ratio": 0.0}, {}, "value_smaller_than_min|ratio"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mode_that_cannot_be_fails_with_a_sentence(server: GraphServer, name):
    widgets, settings, sentence = REFUSALS[name]
    with pytest.raises(GraphError, match=sentence):
        server.run(starter_graph(mode=mode(**widgets), sampler=sampler(mode=["mode", 0], **settings), save=save(["sampler", 0])))
