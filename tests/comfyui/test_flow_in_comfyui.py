"""The flow mathematics against ComfyUI's: the same initial noise and the same Euler step, bit for bit."""

from __future__ import annotations

import pytest
import torch

from mixgrpo.backend.flow.noise import initial_noise
from mixgrpo.backend.flow.rollout import rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import Window

SHAPES = [(1, 16, 8, 8), (5, 16, 8, 8), (3, 4, 6, 10), (2, 16, 3, 4, 6)]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_initial_noise_is_comfyuis(comfy, seed, shape):
    assert torch.equal(initial_noise(seed, shape), comfy.sample.prepare_noise(torch.zeros(shape), seed))


@pytest.mark.parametrize("batch_index", [[0, 1, 2], [4], [2, 0, 2], [6, 1, 6, 3]])
def test_initial_noise_of_chosen_rows_is_comfyuis(comfy, batch_index):
    shape = (len(batch_index), 16, 8, 8)
    assert torch.equal(initial_noise(11, shape, batch_index), comfy.sample.prepare_noise(torch.zeros(shape), 11, batch_index))


@pytest.mark.parametrize("window", [Window(0, 0), Window(2, 3)], ids=["empty window", "eta 0"])
@pytest.mark.parametrize(("steps", "shift"), [(8, 3.0), (11, 1.7)])
def test_a_rollout_without_noise_is_comfyuis_euler(comfy, window, steps, shift):
    sigmas = shifted_sigmas(steps, shift).float()
    noise = initial_noise(3, (4, 16, 8, 8))
    target = initial_noise(4, (4, 16, 8, 8))

    def denoise(x, sigma):
        """A stand-in for a model: nonlinear in x and sigma, so that every step's arithmetic shows."""
        return torch.tanh(x * 1.3 + target) * (1 - sigma.view(-1, 1, 1, 1) / 3)

    def velocity(x, sigma):
        return (x - denoise(x, sigma.expand(len(x)))) / sigma

    eta = 0.0 if window.size else 0.7
    ours = rollout(velocity, noise, sigmas, window, eta, None, 4, shared=False)
    theirs = comfy.k_diffusion.sampling.sample_euler(denoise, noise, sigmas, disable=True)
    assert torch.equal(ours.final, theirs)
    assert not ours.states and not len(ours.log_probs)
