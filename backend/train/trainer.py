"""The trainer: for every iteration a rollout of groups, their scores and advantages, and several updates of the adapter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import MixGRPOError
from ..flow.advantages import Advantages
from ..flow.noise import derive_seed, initial_noise, step_noise
from ..flow.objective import Replay, ReplayGap, check_replay, replay_gap, replay_groups, replay_step
from ..flow.plan import SamplingMode, plan_rollout
from ..flow.rollout import Trajectory, rollout
from ..flow.sigmas import dynamic_shift, shifted_sigmas
from ..flow.window import WINDOW_POLICIES, Window
from ..models.base import GuidedVelocity, RowCounter
from ..models.families import arithmetic, load_model
from ..rewards import HELD_OUT, make_scorer
from ..specs import SamplingSpec, TrainSpec
from . import adapter
from .ema import Ema, learning_rate
from .meter import Meter, StepNumbers
from .objective import Objective
from .prompts import prompt_rows
from .ranks import Ranks, gradient_norm
from .report import iteration_numbers
from .run_folder import Checkpoint
from .scoring import Scores, Scoring
from .sharing import by_group, in_parts, joined, share_of, with_others


class TrainingError(MixGRPOError):
    """Training cannot go on; what was saved before is safe."""


def sigma_table(spec: SamplingSpec) -> torch.Tensor:
    """The sigma table of a job, float32 (steps + 1,): one table for rollout, training and evaluation."""
    shift = dynamic_shift(spec.width * spec.height // 256) if spec.shift == "dynamic" else spec.shift
    return shifted_sigmas(spec.steps, shift).float()


def window_of(spec: TrainSpec, iteration: int) -> Window:
    """The window of a job's iteration, counted from 0."""
    plan = spec.sampling.window
    return WINDOW_POLICIES[plan.policy](iteration, spec.sampling.steps, plan.size, **plan.settings(spec.seed))


def _windows(spec: TrainSpec) -> set[Window]:
    """The windows of a job, as far as its first thousands of iterations tell; by then every policy has been everywhere."""
    return {window_of(spec, iteration) for iteration in range(min(spec.iterations, 5000))}


@dataclass(frozen=True)
class Rollout:
    """This rank's pictures of one iteration and what they are worth."""

    velocity: GuidedVelocity
    trajectory: Trajectory
    prompts: torch.Tensor  # (P,) rows into the job's prompts
    pictures: torch.Tensor  # (P G, 3, H, W); of a split group, this rank's members only
    everyone: dict[str, torch.Tensor]  # the scores of all ranks' groups, rewards and monitors
    advantages: Advantages  # (P, G)
    trained: torch.Tensor  # (P, n), the places in their group of those who are trained
    steps: list[int]  # which of the window's steps are trained, counted from its start


class Trainer:
    """One rank of a training run. It needs no server and no folder: what it has learnt is in :meth:`checkpoint`."""

    def __init__(self, spec: TrainSpec, ranks: Ranks, resume: Checkpoint | None = None, start: Path | None = None):
        """Load the model, embed the prompts once, and continue from ``resume`` if it is given.

        Args:
            start: the file that ``spec.lora.start_from`` names, which a first beginning needs.

        Raises:
            MixGRPOError: a scorer, a prompt, the picture size, the noise level, the LoRA to start from or the ranks do not
                fit; before any training.
        """
        self.spec, self.ranks = spec, ranks
        self.part = share_of(spec, ranks)
        self.share = self.part.groups
        held_out = [reward.scorer for reward in spec.rewards if reward.scorer in HELD_OUT]
        if held_out:
            raise TrainingError(f"{held_out[0]} is held out: it may only be watched; list it under monitors, not under rewards")
        self.scorers = {reward.scorer: make_scorer(reward.scorer, **reward.options) for reward in (*spec.rewards, *spec.monitors)}
        for scorer in self.scorers.values():
            scorer.check_prompts(spec.prompts)
        self.sigmas = sigma_table(spec.sampling)
        self.mode = SamplingMode(**spec.sampling.mode.model_dump())
        self.objective = Objective(spec)
        for window in sorted(_windows(spec), key=lambda window: window.start):
            plan_rollout(self.sigmas, window, spec.sampling.eta, self.mode)
        self.model = load_model(spec.model, ranks.device)
        begun = None if resume is None else resume.adapter
        if begun is None and spec.lora.start_from is not None:
            if start is None:
                raise TrainingError(f"the job starts from the LoRA {spec.lora.start_from[:12]}…, so its file must be given")
            begun = adapter.read_start(start, self.model.transformer, spec.lora)
        self.latent_shape = self.model.latent_shape(spec.sampling.width, spec.sampling.height)
        self.conditions = self.model.encode(list(spec.prompts))
        self.negative = self.model.encode([spec.negative_prompt])
        self.model.text_encoder = None  # every text is embedded; free its memory

        transformer = self.model.transformer
        if spec.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        adapter.add_adapter(transformer, spec.lora, spec.seed)
        if begun is not None:
            adapter.load_adapter(transformer, begun)
        self.iteration = 0 if resume is None else resume.iteration
        ranks.shard(transformer, self.model.autocast, spec.offload)
        self.parameters = adapter.adapter_parameters(transformer)
        self.optimizer = adapter.make_optimizer(self.parameters, spec.optimizer)
        if resume is not None:
            adapter.load_optimizer(self.optimizer, self.parameters, resume.optimizer)
        self.ema = None if spec.ema is None else Ema(spec.ema, self.parameters, None if resume is None else resume.ema)
        self.counter = RowCounter(transformer)
        self.meter, self.by_step = Meter(ranks.device), StepNumbers()
        self.gate: dict[str, float] | None = None
        """What the replay gate saw before the first update of this process, over all ranks."""

    def checkpoint(self) -> Checkpoint:
        """Everything that continuing needs (a collective call: every rank must make it)."""
        return Checkpoint(
            self.iteration,
            adapter.adapter_tensors(self.model.transformer),
            adapter.optimizer_tensors(self.optimizer, self.parameters),
            self.layout,
            None if self.ema is None else self.ema.whole(),
        )

    @property
    def layout(self) -> dict[str, Any]:
        """What a bit-equal continuation must have the same of."""
        return {
            "ranks": self.ranks.count,
            "threads": torch.get_num_threads(),
            "device": self.ranks.device.type,
            "rows_per_call": self.spec.rows_per_call,
            "torch": torch.__version__,
            **({"groups_at_once": self.spec.groups_at_once} if self.spec.groups_at_once else {}),
        }

    def guided_velocity(self) -> GuidedVelocity:
        """The model with the job's prompts, negative prompt and guidance."""
        spec = self.spec
        return GuidedVelocity(self.model, self.conditions, self.negative, spec.sampling.guidance, spec.rows_per_call)

    def window(self) -> Window:
        """The window of the next iteration."""
        return window_of(self.spec, self.iteration)

    def train_iteration(self, on_rollout: Callable[[Rollout], None] | None = None) -> dict[str, Any]:
        """One iteration; returns its numbers, the same on every rank. ``on_rollout`` may look at this rank's pictures."""
        batch = self.collect()
        if on_rollout:
            on_rollout(batch)
        gate = None if self.gate else self.check_whole_replay(batch)
        updates = [self.update(batch, number) for number in range(self.spec.optimizer.updates_per_rollout)]
        self.iteration += 1
        rows = {name: round(count * self.ranks.count) for name, count in self.counter.take().items()}
        return {
            "iteration": self.iteration,
            **iteration_numbers(batch, updates, self.objective.reported, self.ranks),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "steps": self.by_step.take(batch.trajectory.window.start, self.ranks),
            "rows": rows,
            **self.meter.take(self.ranks),
        } | ({"replay_gate": gate} if gate else {})

    # ------------------------------------------------------------------ rollout

    def collect(self) -> Rollout:
        """Draw this rank's groups, decode them, score them; while some are scored, the next are drawn."""
        spec = self.spec
        places = range(self.iteration * spec.prompts_per_iteration, (self.iteration + 1) * spec.prompts_per_iteration)[self.share]
        everyone = prompt_rows(spec.seed, self.iteration, len(spec.prompts), spec.prompts_per_iteration)
        prompts = torch.tensor(everyone[self.share])
        velocity = self.guided_velocity()
        trajectories, pictures = [], []
        with Scoring(self._score) as scoring:
            for part in in_parts(len(prompts), spec.groups_at_once):
                trajectories.append(self._draw(velocity, prompts[part], places[part]))
                with self._phase("decode"):
                    pictures.append(self.model.decode(trajectories[-1].final))
                scoring.add(pictures[-1], prompts[part])
            with self._phase("score"):  # what is left to wait for
                scores = scoring.scores()
        self._require_scores(scores)
        trajectory = with_others(joined(trajectories), self.part, self.ranks)
        together = {
            name: by_group(values.to(self.ranks.device), self.part, self.ranks.gather).cpu() for name, values in scores.items()
        }
        advantages = self.objective.advantages(together).of(self.share)
        trained, steps = self.objective.trained(advantages), self.objective.steps(self.iteration)
        return Rollout(velocity, trajectory, prompts, torch.cat(pictures), together, advantages, trained, steps)

    def _draw(self, velocity: GuidedVelocity, prompts: torch.Tensor, places: range) -> Trajectory:
        sampling, members = self.spec.sampling, self.part.members(self.spec.group_size)
        with self._phase("rollout"):
            trajectory = rollout(
                lambda x, sigma: velocity(x, sigma, prompts.repeat_interleave(len(x) // len(prompts))),
                self._initial_noise(places),
                self.sigmas,
                self.window(),
                sampling.eta,
                lambda step: self._step_noise(places, step),
                members.stop - members.start,
                shared=sampling.shared_noise,
                mode=self.mode,
            )
        if not trajectory.final.isfinite().all():
            raise TrainingError(
                f"the model returned NaN or infinity in iteration {self.iteration + 1}; lower the learning rate or the guidance "
                "and continue from the last checkpoint"
            )
        return trajectory

    def _initial_noise(self, places: range) -> torch.Tensor:
        rows = 1 if self.spec.sampling.shared_noise else self.spec.group_size
        own = slice(0, 1) if rows == 1 else self.part.members(rows)
        noise = [
            initial_noise(derive_seed(self.spec.seed, "initial noise", place), (rows, *self.latent_shape))[own]
            for place in places
        ]
        return self._to_model(torch.cat(noise))

    def _step_noise(self, places: range, step: int) -> torch.Tensor:
        size = self.spec.group_size
        samples = [place * size + member for place in places for member in range(size)[self.part.members(size)]]
        return self._to_model(step_noise(self.spec.seed, samples, step, self.latent_shape))

    def _to_model(self, noise: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if arithmetic(self.spec.model) == torch.float64 else torch.float32
        return noise.to(self.ranks.device, dtype)

    def _score(self, pictures: torch.Tensor, prompts: torch.Tensor) -> Scores:
        each = len(pictures) // len(prompts)
        texts = [self.spec.prompts[row] for row in prompts.tolist() for _ in range(each)]
        return {name: scorer.score(pictures, texts).view(len(prompts), -1) for name, scorer in self.scorers.items()}

    def _require_scores(self, scores: Scores) -> None:
        scored = {reward.scorer: float(scores[reward.scorer].isfinite().any()) for reward in self.spec.rewards}
        for name, any_scored in self.ranks.largest(scored).items():
            if not any_scored:
                raise TrainingError(
                    f"{name} could score no picture of iteration {self.iteration + 1}; there is nothing to learn from"
                )

    # ------------------------------------------------------------------ update

    def members(self, batch: Rollout, number: int) -> torch.Tensor:
        """Rows of update ``number``: an equal part of every group's trained members, of a split group this rank's."""
        groups, count = batch.trained.shape
        part = count // self.spec.optimizer.updates_per_rollout
        within = batch.trained[:, number * part : (number + 1) * part][:, self.part.members(part)]
        return (torch.arange(groups)[:, None] * self.spec.group_size + within).flatten()

    def accumulate(self, batch: Rollout, members: torch.Tensor) -> dict[str, float]:
        """Add the objective's gradient over ``members`` and the trained steps; returns means over them and the replay gap."""
        trajectory, size = batch.trajectory, len(batch.steps)
        total = len(members) * self.ranks.count * size
        advantages = batch.advantages.values.flatten().to(trajectory.final)
        sums = dict.fromkeys(self.objective.reported, 0.0)
        gap = ReplayGap(0.0, 0.0)
        for index in batch.steps:
            for part in self._calls(members):
                base = self._base_velocity(batch, index, part)
                with self._phase("training"):
                    replay = self._replay(batch, index, part)
                    terms = self.objective.of_rows(trajectory, index, part, advantages[part], replay, base)
                    # FSDP averages gradients over ranks, so every rank counts as if the others' share were its own
                    (terms.loss * (self.ranks.count / total)).backward()
                gap = gap.worst(replay_gap(trajectory, index, part, replay.mean.detach()))
                sums = {name: value + terms.sums[name] for name, value in sums.items()}
                self.by_step.add(index, terms.sums["ratio_deviation"], terms.sums["clip_fraction"], len(part))
        means = {name: value / (len(members) * size) for name, value in sums.items()}
        return means | {"mean_gap": gap.mean_gap, "log_prob_gap": gap.log_prob_gap}

    def update(self, batch: Rollout, number: int) -> dict[str, float]:
        """One optimiser step on the members of update ``number``."""
        self.optimizer.zero_grad()
        numbers = self.accumulate(batch, self.members(batch, number))
        if number == 0:
            self._enforce_replay(ReplayGap(numbers["mean_gap"], numbers["log_prob_gap"]))
        norm = gradient_norm(self.parameters.values(), self.spec.optimizer.max_grad_norm)
        if norm != norm or norm == float("inf"):
            raise TrainingError(
                f"the gradient is not finite in iteration {self.iteration + 1}; lower the learning rate and continue from the "
                "last checkpoint"
            )
        count = self.iteration * self.spec.optimizer.updates_per_rollout + number
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.spec.optimizer, count)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.after(count)
        digest = adapter.adapter_hash(adapter.adapter_tensors(self.model.transformer))
        self.ranks.require_equal(digest, "the adapter")
        return numbers | {"gradient_norm": norm, "adapter_hash": digest}

    def check_whole_replay(self, batch: Rollout) -> dict[str, float]:
        """The replay gate over every stored step and sample, before the first update of this process."""
        trajectory, gap = batch.trajectory, ReplayGap(0.0, 0.0)
        everyone = self.part.rows(trajectory.groups, trajectory.group_size)
        with torch.no_grad(), self._phase("replay"):
            for index in range(len(trajectory.means)):
                for part in self._calls(everyone):
                    gap = gap.worst(replay_gap(trajectory, index, part, self._replay(batch, index, part).mean))
        self.gate = self._enforce_replay(gap)
        return self.gate

    def _replay(self, batch: Rollout, index: int, members: torch.Tensor) -> Replay:
        owners = batch.prompts[replay_groups(batch.trajectory, index, members)]
        return replay_step(batch.velocity.for_prompts(owners), batch.trajectory, index, members)

    def _base_velocity(self, batch: Rollout, index: int, members: torch.Tensor) -> torch.Tensor | None:
        """What the model without its adapter says of the same rows, where the objective asks for it."""
        if self.objective.kl is None:
            return None
        with torch.no_grad(), self._phase("reference"), adapter.switched_off(self.model.transformer):
            return self._replay(batch, index, members).velocity

    def _calls(self, members: torch.Tensor) -> list[torch.Tensor]:
        """Members in parts of whole groups that fit one model call, so that a group's shared first step stays one row."""
        each = len(members) // (self.share.stop - self.share.start)
        doubled = 1 if self.spec.sampling.guidance == 1 else 2
        return list(members.split(max(1, self.spec.rows_per_call // (each * doubled)) * each))

    def _enforce_replay(self, gap: ReplayGap) -> dict[str, float]:
        worst = self.ranks.largest({"mean_gap": gap.mean_gap, "log_prob_gap": gap.log_prob_gap})
        check_replay(ReplayGap(**worst), arithmetic(self.spec.model), self.objective.narrowest_clip)
        return worst

    @contextmanager
    def _phase(self, name: str):
        with self.counter.phase(name), self.meter.phase(name):
            yield
