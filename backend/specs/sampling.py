"""How pictures are drawn in training: the sigma table, the window and what moves it, the kinds of steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .base import Count, Index, NotNegative, Shift, Spec

_POLICIES: dict[str, dict[str, Any]] = {
    "frozen": {"start": 0},
    "progressive": {"start": 0, "stride": 0, "every": 25, "end": "hold"},
    "decay": {"start": 0, "stride": 1, "every": 10, "every_last": 1, "end": "hold"},
    "exp_decay": {"start": 0, "stride": 1, "every": 25, "rate": 0.1, "threshold": 13, "end": "hold"},
    "random": {"first": 0, "last": None},
    "list": {"starts": None, "every": 1, "end": "wrap"},
}
"""What every policy uses, with the defaults of its function in ``backend.flow.window``, but for progressive's stride: there the
window stays in place unless it is told to move."""


class WindowSpec(Spec):
    """The ``size`` steps that are stochastic and trained, and the policy that moves them from iteration to iteration.

    A field that the policy does not use is refused, and is null; one that it uses and that is left out has the policy's default.
    The step to sigma 0 is never stochastic.
    """

    policy: Literal["frozen", "progressive", "decay", "exp_decay", "random", "list"] = "progressive"
    size: Count = 4
    start: Index | None = None
    stride: Index | None = None
    every: Count | None = None
    end: Literal["hold", "wrap", "bounce"] | None = None
    every_last: Count | None = None
    rate: NotNegative | None = None
    threshold: Index | None = None
    first: Index | None = None
    last: Index | None = None
    starts: Annotated[tuple[Index, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _only_what_is_used(self) -> WindowSpec:
        used, given = _POLICIES[self.policy], self._given()
        unused = [name for name in given if name not in used]
        if unused:
            raise ValueError(f"the window policy {self.policy} does not use {', '.join(unused)}; it uses {', '.join(used)}")
        if self.policy == "list" and self.starts is None:
            raise ValueError("the window policy list needs starts, for example [0, 4, 8]")
        for name, default in used.items():  # so that what is left out and what is written out are the same job
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        return self

    def _given(self) -> dict[str, Any]:
        return self.model_dump(exclude={"policy", "size"}, exclude_none=True)

    def settings(self, seed: int) -> dict[str, Any]:
        """What the policy's function takes by keyword; ``seed`` is the job's, for the policy random."""
        return ({"seed": seed} if self.policy == "random" else {}) | self._given()

    @property
    def starts_given(self) -> list[int]:
        """The starts that are written down; a policy that moves from there stops where the window still fits."""
        return [*(self.starts or ()), *(start for start in (self.start, self.first, self.last) if start is not None)] or [0]


class ModeSpec(Spec):
    """What takes the steps, by the names in ``backend.flow``: see ``SamplingMode`` there."""

    dynamics: Literal["flow_sde", "dance_sde", "cps", "precise"] = "flow_sde"
    log_prob: Literal["gaussian", "variance_free", "ratio_norm"] = "gaussian"
    solver: Literal["euler", "heun", "dpmpp_1m", "dpmpp_2m", "dpmpp_2m_heun", "dpmpp_3m"] = "euler"
    solver_after: Literal["euler", "heun", "dpmpp_1m", "dpmpp_2m", "dpmpp_2m_heun", "dpmpp_3m"] | None = None
    history: Literal["carry", "reset"] = "carry"
    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0


class SamplingSpec(Spec):
    """How pictures are drawn in training; ``guidance`` 1 means no classifier-free guidance (half the cost)."""

    steps: Annotated[int, Field(ge=2, le=1000)] = 25
    shift: Shift = 3.0
    guidance: Annotated[float, Field(ge=0, le=100)] = 1.0
    eta: Annotated[float, Field(gt=0, le=10)] = 0.7
    width: Count = 64
    height: Count = 64
    shared_noise: bool = True
    window: WindowSpec = WindowSpec()
    mode: ModeSpec = ModeSpec()

    @model_validator(mode="after")
    def _window_fits(self) -> SamplingSpec:
        start = max(self.window.starts_given)
        if start + self.window.size > self.steps - 1:
            raise ValueError(
                f"a window of {self.window.size} from step {start} does not fit {self.steps} steps: "
                f"start + size may be at most {self.steps - 1}, since the last step is never stochastic"
            )
        return self
