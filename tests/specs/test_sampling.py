"""What a job says about sampling, and the functions that it names."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from mixgrpo.backend.flow.dynamics import LOG_PROBS, SDE_DYNAMICS
from mixgrpo.backend.flow.plan import SamplingMode
from mixgrpo.backend.flow.solvers import SOLVERS
from mixgrpo.backend.flow.window import WINDOW_POLICIES
from mixgrpo.backend.specs import ModeSpec, WindowSpec
from mixgrpo.backend.specs.sampling import _POLICIES


def literals(spec: type, field: str) -> set[str]:
    annotation = spec.model_fields[field].annotation
    return {name for part in (annotation, *get_args(annotation)) for name in get_args(part) if isinstance(name, str)}


def test_the_names_are_the_registries():
    assert literals(ModeSpec, "dynamics") == set(SDE_DYNAMICS)
    assert literals(ModeSpec, "log_prob") == set(LOG_PROBS)
    assert literals(ModeSpec, "solver") == literals(ModeSpec, "solver_after") == set(SOLVERS)
    assert set(_POLICIES) == set(WINDOW_POLICIES) == literals(WindowSpec, "policy")
    assert ModeSpec().model_dump() == {name: getattr(SamplingMode(), name) for name in ModeSpec.model_fields}


@pytest.mark.parametrize("policy", WINDOW_POLICIES)
def test_the_defaults_are_the_functions(policy):
    parameters = inspect.signature(WINDOW_POLICIES[policy]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "seed"}
    needed = {name: None if default is inspect.Parameter.empty else default for name, default in defaults.items()}
    assert _POLICIES[policy] == needed | ({"stride": 0} if policy == "progressive" else {})


@pytest.mark.parametrize("policy", WINDOW_POLICIES)
def test_every_policy_runs_from_its_spec(policy):
    spec = WindowSpec(policy=policy, size=3, **{"starts": (5, 1)} if policy == "list" else {})
    windows = {WINDOW_POLICIES[policy](iteration, 12, spec.size, **spec.settings(7)) for iteration in range(300)}
    assert all(window.size == 3 for window in windows)
    assert (len(windows) > 1) == (policy not in ("frozen", "progressive"))
    assert WindowSpec.model_validate(spec.model_dump()) == spec
