"""What all specs share: the types of their fields, and refusals in sentences."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ..errors import MixGRPOError


def _shift(value: Any) -> Any:
    """One sentence instead of one for every member of the union."""
    try:
        fits = value == "dynamic" or 0 < float(value) < math.inf
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError("must be a finite number above 0, or the word dynamic")
    return value


def _digest(value: Any) -> Any:
    """One spelling, since it counts for the identity."""
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise ValueError("must be the SHA-256 of a LoRA file's bytes, 64 hexadecimal digits, or null")
    return value.lower()


def _option(value: Any) -> Any:
    if not isinstance(value, (bool, int, float, str)) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("must be true or false, a finite number, or text")
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=999_999)]  # six digits in file names, which therefore sort
Index = Annotated[int, Field(ge=0, le=999_999)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Digest = Annotated[str | None, BeforeValidator(_digest)]
Shift = Annotated[float | Literal["dynamic"], BeforeValidator(_shift)]
Option = Annotated[bool | int | float | str, BeforeValidator(_option)]


class SpecError(MixGRPOError):
    """A job that cannot be run as written; the message names every field, what was given and what is allowed."""


class Spec(BaseModel):
    """A frozen model that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Text such as "1e-4" is taken as a number, because YAML calls it text; but ``yes`` would be taken as 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("cannot be true or false")
        return value


_Parsed = TypeVar("_Parsed", bound=Spec)


def parse(kind: type[_Parsed], fields: Any, what: str) -> _Parsed:
    """Build ``kind`` from plain data; raises :class:`SpecError` with one clause for every field that is wrong."""
    if not isinstance(fields, dict):
        raise SpecError(f"{what} is a mapping of fields, got {type(fields).__name__}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise SpecError("; ".join(_sentence(problem) for problem in _causes(error.errors()))) from None


def _causes(problems: list[Any]) -> list[Any]:
    """Without "too few entries" where an entry was refused: pydantic counts only the good ones."""
    refused = {problem["loc"][:-depth] for problem in problems for depth in range(1, len(problem["loc"]))}
    return [problem for problem in problems if not (problem["type"] == "too_short" and problem["loc"] in refused)]


_ALLOWED = {
    "extra_forbidden": "there is no such field; check the spelling",
    "missing": "is required",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "too_short": "needs at least {min_length} entry",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping of fields",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "may hold up to 64 letters, digits, _ and -, and begins with a letter or digit",
}


def _sentence(problem: Any) -> str:
    """What is allowed there, and what was given (unless there is nothing, or the sentence is about a part of it)."""
    kind, given = problem["type"], problem["input"]
    field = ".".join(str(part) for part in problem["loc"]) or "job"
    message = problem["msg"].removeprefix("Value error, ")
    allowed = _ALLOWED[kind].format(**problem.get("ctx", {})) if kind in _ALLOWED else message
    of_a_part = kind == "value_error" and isinstance(given, (BaseModel, dict, list, tuple))
    hidden = of_a_part or kind in ("extra_forbidden", "missing")
    return f"{field}: {allowed}" + ("" if hidden else f" (given: {str(given)[:80]!r})")
