"""The whole algorithm on two dimensions: MixGRPO moves a flow towards a reward, and does not when advantages mean nothing.

The flow is pre-trained on two Gaussians at (-1.5, 0) and (1.5, 0); the reward is -|x - (1.5, 1)|^2. Learning means more samples
on the right, and higher up. It is judged under noise-free sampling, which is how a trained model is used.
"""

import copy

import pytest
import torch
from torch import nn

from mixgrpo.backend.flow.advantages import group_advantages
from mixgrpo.backend.flow.noise import derive_seed, initial_noise, step_noise
from mixgrpo.backend.flow.objective import clipped_objective, replay_log_prob, replay_step
from mixgrpo.backend.flow.rollout import rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import Window

SIGMAS = shifted_sigmas(25, 3.0)
GROUPS, GROUP_SIZE, UPDATES, CLIP = 32, 12, 4, 1e-4
TARGET = torch.tensor([1.5, 1.0])


class ToyFlow(nn.Module):
    """v(x, sigma) for x (rows, 2): an MLP on x and four Fourier pairs of sigma."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))
        self.register_buffer("frequencies", torch.pi * 2.0 ** torch.arange(-1, 3))

    def forward(self, x, sigma):
        angles = sigma.reshape(-1, 1) * self.frequencies
        time = torch.cat([angles.sin(), angles.cos()], 1)
        return self.layers(torch.cat([x, time.expand(len(x), -1)], 1))


def pretrained() -> ToyFlow:
    torch.manual_seed(0)
    flow = ToyFlow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    for _ in range(1000):
        side = torch.randint(0, 2, (256, 1)) * 2.0 - 1
        data = side * torch.tensor([[1.5, 0.0]]) + 0.3 * torch.randn(256, 2)
        noise, t = torch.randn(256, 2), torch.rand(256, 1)
        loss = (flow((1 - t) * data + t * noise, t) - (noise - data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return flow


def reward(x):
    return -(x - TARGET).square().sum(-1)


def noise_free_reward(flow) -> float:
    ended = rollout(flow, initial_noise(99, (2048, 2)), SIGMAS, Window(0, 0), 0.0, lambda step: None, group_size=1).final
    return reward(ended).mean().item()


def train(flow, iterations: int, permuted: bool) -> float:
    """MixGRPO: 32 initial noises, 12 samples of each, a window of 4 that moves every 10 iterations, 4 updates per rollout.

    Returns the largest |rho - 1| met in a first update of an iteration, where rollout and training pass are the same model.
    """
    optimizer = torch.optim.AdamW(flow.parameters(), lr=1e-4)
    shuffle = torch.Generator().manual_seed(5)
    members = torch.arange(GROUPS * GROUP_SIZE).reshape(GROUPS, UPDATES, -1).transpose(0, 1).reshape(UPDATES, -1)
    off_policy = 0.0
    for iteration in range(iterations):
        window = Window(iteration // 10, 4)
        ids = range(iteration * GROUPS * GROUP_SIZE, (iteration + 1) * GROUPS * GROUP_SIZE)
        start = initial_noise(derive_seed("start", iteration), (GROUPS, 2))
        trajectory = rollout(flow, start, SIGMAS, window, 0.7, lambda step, ids=ids: step_noise(1, ids, step, (2,)), GROUP_SIZE)
        advantages = group_advantages(reward(trajectory.final).reshape(GROUPS, GROUP_SIZE)).values
        if permuted:
            advantages = advantages.gather(1, torch.rand(advantages.shape, generator=shuffle).argsort(1))
        for update, rows in enumerate(members):
            optimizer.zero_grad()
            for index in range(window.size):
                mean = replay_step(flow, trajectory, index, rows).mean
                new, old = replay_log_prob(trajectory, index, rows, mean), trajectory.log_probs[index][rows]
                terms = clipped_objective(new, old, advantages.flatten()[rows], CLIP)
                (terms.loss.mean() / window.size).backward()
                if update == 0:
                    off_policy = max(off_policy, (terms.ratio - 1).abs().max().item())
            nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
            optimizer.step()
    return off_policy


def test_mixgrpo_learns_the_reward_and_nothing_from_permuted_advantages():
    base = pretrained()
    before = noise_free_reward(base)
    assert before == pytest.approx(-5.68, abs=0.4)  # of the two Gaussians themselves: -(9 / 2 + 1 + 2 * 0.3^2)

    gains = {}
    for permuted in (False, True):
        flow = copy.deepcopy(base)
        off_policy = train(flow, iterations=50, permuted=permuted)
        assert off_policy < CLIP
        gains[permuted] = noise_free_reward(flow) - before
    assert gains[False] > 0.4
    assert abs(gains[True]) < 0.1
