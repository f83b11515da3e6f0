"""Settings of a comparison: what they become, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mixgrpo.backend.flow.sigmas import dynamic_shift, shifted_sigmas
from mixgrpo.backend.lab.entries import PICTURE_BYTES, LabError, check_equal_nfe, check_memory
from mixgrpo.backend.lab.spec import load_compare, parse_compare, parse_entry
from mixgrpo.backend.specs import SpecError

EXAMPLE = Path(__file__).parents[2] / "workflows" / "jobs" / "compare.yaml"
NO_NOISE = {"size": 0}


def spec(*entries: dict, **fields):
    return parse_compare({"prompts": ["a prompt"], "entries": list(entries) or [{"label": "a"}]} | fields)


def test_the_example_is_a_comparison_at_equal_cost():
    example = load_compare(EXAMPLE)
    assert example.equal_nfe and len({entry.plan.nfe for entry in example.built_entries()}) == 1
    assert parse_compare(example.model_dump(mode="json")) == example


def test_cases_are_seed_after_seed_of_every_prompt():
    cases = spec(prompts=["one", "two"], seed=5, seeds=2).cases()
    assert [(case.prompt, case.seed) for case in cases] == [("one", 5), ("one", 6), ("two", 5), ("two", 6)]


def test_an_entry_has_its_table_and_its_cost():
    flash = {"label": " flash ", "steps": 25, "mode": {"solver_after": "dpmpp_2m", "ratio": 0.4}}
    heun = {"label": "heun", "steps": 5, "shift": "dynamic", "window": NO_NOISE, "mode": {"solver": "heun"}}
    first, second = spec(flash, heun, width=512, height=256).built_entries()
    assert (first.label, first.plan.nfe, first.steps) == ("flash", 13, 13)
    assert torch.equal(second.sigmas, shifted_sigmas(5, dynamic_shift(512)).float())
    assert (second.plan.nfe, second.steps) == (9, 5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": NO_NOISE}, "euler"),
        ({"eta": 0, "mode": {"solver": "heun"}}, "heun"),
        ({"eta": 0, "mode": {"solver": "heun", "solver_after": "dpmpp_2m"}}, "heun to 4, dpmpp_2m"),
        ({"window": NO_NOISE, "mode": {"ratio": 0.5}}, "euler x 0.5"),
        ({}, "flow_sde 0.7 at 0-3, euler"),
        ({"window": {"start": 3, "size": 1}, "mode": {"dynamics": "cps", "ratio": 0.4}}, "euler, cps 0.7 at 3, euler x 0.4"),
    ],
)
def test_an_entry_says_what_it_is(fields, words):
    assert parse_entry({"label": "a"} | fields).words == words


def test_equal_nfe_names_the_steps_that_would_match():
    euler = {"label": "euler", "steps": 11, "window": NO_NOISE}
    heun = {"label": "heun", "steps": 9, "window": NO_NOISE, "mode": {"solver": "heun"}}
    flash = {"label": "flash", "steps": 25, "mode": {"ratio": 0.4}}
    with pytest.raises(SpecError, match="'heun' costs 17 .* 'euler' costs 11.*: 6 steps would match"):
        spec(euler, heun, equal_nfe=True)
    with pytest.raises(SpecError, match="'flash' costs 13 .*: 20 steps would match"):
        spec(euler, flash, equal_nfe=True)
    assert [
        entry.plan.nfe for entry in spec(euler, heun | {"steps": 6}, flash | {"steps": 20}, equal_nfe=True).built_entries()
    ] == [11] * 3
    with pytest.raises(SpecError, match="'heun' costs 17 .* 'euler' costs 12.*no number of steps matches"):
        spec(euler | {"steps": 12}, heun, equal_nfe=True)
    check_equal_nfe(spec(euler, euler | {"label": "b"}).built_entries())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"entries": []}, "entries: needs at least 1 entry"),
        ({"entries": [{"label": "a", "step": 3}]}, r"entries\.0\.step: there is no such field"),
        ({"entries": [{"label": "a", "mode": {"dynamics": "sde"}}]}, r"entries\.0\.mode\.dynamics: must be 'flow_sde'"),
        ({"entries": [{"label": " "}]}, r"entries\.0\.label: must be 1 to 60 characters"),
        ({"entries": [{"label": "a"}, {"label": "a "}]}, "the label 'a' stands for two samplers"),
        ({"entries": [{"label": "a", "steps": 4}]}, "entry 'a': a window of 4 from step 0 does not fit a table of 4 steps"),
        ({"entries": [{"label": "a", "eta": 2}]}, "entry 'a': eta 2.0 is too large for step 0"),
        ({"entries": [{"label": "a", "shift": 0}]}, r"entries\.0\.shift: must be a finite number above 0"),
        ({"prompts": []}, "prompts: needs at least 1 entry"),
        ({"rewards": [{"scorer": "x"}, {"scorer": "x"}]}, "scorer x is named twice"),
        ({"equal_nfe": "perhaps"}, "equal_nfe: must be true or false"),
        ({"seeds": 100_000, "width": 1024, "height": 1024}, "GiB of decoded pictures"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_sentence(fields, sentence):
    with pytest.raises(SpecError, match=sentence) as refused:
        spec(**fields)
    assert "\n" not in str(refused.value)


def test_memory_is_refused_with_what_would_fit():
    numbers = 3 * 512 * 512
    fits = PICTURE_BYTES // (4 * 3 * numbers)
    check_memory(3, fits, numbers)
    with pytest.raises(LabError, match=f"3 samplers with {fits + 1} pictures each are 2.0 GiB .* at most {fits} pictures"):
        check_memory(3, fits + 1, numbers)
