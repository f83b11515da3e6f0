"""Presets: what they set is legal, published, and gives way to the job."""

from __future__ import annotations

import pytest
from test_job import job
from typer.testing import CliRunner

from mixgrpo.backend.cli import app
from mixgrpo.backend.flow.plan import SamplingMode, plan_rollout
from mixgrpo.backend.flow.sigmas import shifted_sigmas
from mixgrpo.backend.flow.window import WINDOW_POLICIES
from mixgrpo.backend.specs import SpecError
from mixgrpo.backend.specs.job import parse_job
from mixgrpo.backend.specs.presets import PRESETS, merged, settings

PLAIN = {"prompts": ["a red circle on a white background"], "rewards": [{"scorer": "jpeg_compressibility"}]}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_job_whose_every_window_can_be_drawn(name):
    spec = parse_job(PLAIN | {"preset": name})
    sampling = spec.sampling
    for iteration in range(0, 600, 7):
        plan = sampling.window
        window = WINDOW_POLICIES[plan.policy](iteration, sampling.steps, plan.size, **plan.settings(0))
        sigmas = shifted_sigmas(sampling.steps, sampling.shift).float()
        plan_rollout(sigmas, window, sampling.eta, SamplingMode(**sampling.mode.model_dump()))
    dumped = dict(settings(spec.model_dump()))
    assert {path: value for path, value in settings(PRESETS[name].fields)}.items() <= dumped.items()


@pytest.mark.parametrize(
    ("name", "rollout", "trained"),
    [
        ("mixgrpo", 25, 4),
        ("mixgrpo-flash", 13, 4),  # 4 + ceil(21 * 0.4)
        ("mixgrpo-flash-star", 9, 4),  # 4 + ceil(21 * 0.2)
        ("full-sde", 25, 14),
        ("flow-grpo", 10, 9),
        ("dance-grpo", 16, 9),
    ],
)
def test_the_published_number_of_model_calls(name, rollout, trained):
    spec = parse_job(PLAIN | {"preset": name})
    plan, sampling = spec.sampling.window, spec.sampling
    window = WINDOW_POLICIES[plan.policy](0, sampling.steps, plan.size, **plan.settings(0))
    drawn = plan_rollout(
        shifted_sigmas(sampling.steps, sampling.shift).float(), window, sampling.eta, SamplingMode(**sampling.mode.model_dump())
    )
    assert drawn.nfe == rollout
    assert (spec.objective.trained_steps or window.size) == trained


def test_a_job_changes_what_a_preset_sets():
    spec = parse_job(PLAIN | {"preset": "mixgrpo-flash", "group_size": 8, "sampling": {"window": {"every": 3}, "shift": 1.0}})
    assert (spec.group_size, spec.sampling.window.every, spec.sampling.shift) == (8, 3, 1.0)
    assert (spec.sampling.mode.ratio, spec.sampling.window.stride) == (0.4, 1)
    other = parse_job(PLAIN | {"preset": "mixgrpo", "sampling": {"window": {"policy": "random"}}})
    assert (other.sampling.window.policy, other.sampling.window.size, other.sampling.window.every) == ("random", 4, None)


def test_a_job_is_what_it_sets_not_what_set_it():
    preset = parse_job(PLAIN | {"preset": "full-sde"})
    assert parse_job(merged(PRESETS["full-sde"].fields, PLAIN)).identity() == preset.identity()
    assert "preset" not in preset.model_dump()


@pytest.mark.parametrize("name", ["flash", 3, None])
def test_other_names_are_refused(name):
    with pytest.raises(SpecError, match="there are mixgrpo, mixgrpo-flash"):
        parse_job(job() | {"preset": name})


def test_a_preset_prints_what_it_sets(tmp_path):
    listed = CliRunner().invoke(app, ["presets"]).output
    assert all(name in listed for name in PRESETS)
    shown = CliRunner().invoke(app, ["presets", "mixgrpo"]).output
    lines = {line.split()[0]: line for line in shown.splitlines()[1:]}
    assert lines["optimizer.learning_rate"].split(None, 2)[1:] == ["0.0003", "for a LoRA; published for all parameters: 1e-05"]
    assert lines["sampling.window.stride"].split() == ["sampling.window.stride", "1"]
    assert CliRunner().invoke(app, ["presets", "nothing"]).exit_code == 1


def test_training_says_where_job_and_preset_differ(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "prompts: [a red circle on a white background]\npreset: mixgrpo\ngroup_size: 4\n"
        "rewards: [{scorer: jpeg_compressibility}]\nmonitors: [{scorer: nothing}]\n"
    )
    ended = CliRunner().invoke(app, ["train", str(path), "--out", str(tmp_path / "run"), "--preset", "full-sde"])
    assert ended.exit_code == 1  # there is no such scorer, so nothing is trained
    lines = {line.split()[0]: line for line in ended.output.splitlines() if line.startswith("  ")}
    assert lines["group_size"].split(None, 2)[1:] == ["12", "the job's: 4"]
    assert lines["objective.trained_steps"].split() == ["objective.trained_steps", "14"]
