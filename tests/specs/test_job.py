"""Jobs: what is refused and in which words, what counts as the same job, how files are read."""

import copy
import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from mixgrpo.backend.specs import SpecError, TrainSpec, load_job
from mixgrpo.backend.specs.job import parse_job, parse_sampling

SMALLEST = {"prompts": ["a red circle on a white background"], "rewards": [{"scorer": "scene_accuracy"}]}


def job(path: str = "", value: object = None) -> dict:
    """The smallest job with one field set, given as ``sampling.window.size``."""
    fields = copy.deepcopy(SMALLEST)
    if path:
        *parents, last = path.split(".")
        place = fields
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
        place[int(last) if isinstance(place, list) else last] = value
    return fields


WHOLE_NUMBERS = {
    "sampling.steps": (2, 1000),
    "sampling.width": (1, 999_999),
    "sampling.height": (1, 999_999),
    "sampling.window.start": (0, 999_999),
    "sampling.window.size": (1, 999_999),
    "sampling.window.stride": (0, 999_999),
    "sampling.window.every": (1, 999_999),
    "group_size": (2, 4096),
    "prompts_per_iteration": (1, 999_999),
    "lora.rank": (1, 1024),
    "optimizer.updates_per_rollout": (1, 999_999),
    "advantage.best_and_worst": (2, 4096),
    "objective.trained_steps": (1, 999_999),
    "iterations": (1, 999_999),
    "checkpoint_every": (1, 999_999),
    "keep_checkpoints": (1, 999_999),
    "keep_loras_every": (1, 999_999),
    "rows_per_call": (1, 999_999),
}
REFUSED = [
    *[(path, bound, f"must be at least {low}") for path, (low, _) in WHOLE_NUMBERS.items() for bound in (low - 1, -7)],
    *[(path, high + 1, f"must be at most {high}") for path, (_, high) in WHOLE_NUMBERS.items()],
    *[(path, value, "must be a whole number") for path in WHOLE_NUMBERS for value in (2.5, "many")],
    *[(path, True, "cannot be true or false") for path in (*WHOLE_NUMBERS, "sampling.eta", "lora.alpha", "seed")],
    ("seed", -1, "must be at least 0"),
    ("seed", 2**63, f"must be below {2**63}"),
    ("sampling.shift", 0, "must be a finite number above 0, or the word dynamic"),
    ("sampling.shift", math.inf, "must be a finite number above 0, or the word dynamic"),
    ("sampling.shift", "static", "must be a finite number above 0, or the word dynamic"),
    ("sampling.guidance", -0.1, "must be at least 0"),
    ("sampling.guidance", 101, "must be at most 100"),
    ("sampling.guidance", math.nan, "must be at most 100"),
    ("sampling.eta", 0, "must be above 0"),
    ("sampling.eta", 11, "must be at most 10"),
    ("sampling.eta", math.nan, "must be at most 10"),
    ("sampling.shared_noise", "perhaps", "must be true or false"),
    ("lora.alpha", 0, "must be above 0"),
    ("lora.alpha", math.inf, "must be a finite number"),
    ("lora.targets", "everything", "must be 'attention' or 'attention+mlp'"),
    ("lora.rslora", [], "must be true or false"),
    *[("lora.start_from", value, "must be the SHA-256 of a LoRA file") for value in ("", "a" * 63, "g" * 64, "../x", 7)],
    ("lora.start_from", True, "cannot be true or false"),
    ("optimizer.learning_rate", 0, "must be above 0"),
    ("optimizer.learning_rate", math.nan, "must be a finite number"),
    ("optimizer.learning_rate", "fast", "must be a number"),
    ("optimizer.weight_decay", -1e-9, "must be at least 0"),
    ("optimizer.max_grad_norm", 0, "must be above 0"),
    ("optimizer.clip_range", 0, "must be above 0"),
    ("optimizer.clip_range", 1, "must be below 1"),
    ("optimizer.clip_range_high", 0, "must be above 0"),
    ("optimizer.clip_range_high", 1, "must be below 1"),
    ("optimizer.advantage_clip", 0, "must be above 0"),
    ("advantage.mixing", "sum", "must be 'advantage', 'reward' or 'gdpo'"),
    ("advantage.std", "batch", "must be 'group' or 'global'"),
    ("advantage.std_floor", 0, "must be above 0"),
    ("advantage.trim", 1, "must be below 1"),
    ("advantage.trim", -0.1, "must be at least 0"),
    ("objective.step_weights", "guard", "must be 'equal' or 'inverse_dt'"),
    ("objective.kl", {}, "is required"),
    ("objective.kl", 0.04, "must be a mapping of fields"),
    ("objective.kl", {"weight": 0}, "must be above 0"),
    ("objective.kl", {"weight": 1, "space": "pixels"}, "must be 'velocity', 'mean', 'mean_rate' or 'mean_square'"),
    ("sampling.window", {"policy": "random", "stride": 2}, "the window policy random does not use stride; it uses first, last"),
    ("sampling.window", {"policy": "list"}, "the window policy list needs starts, for example"),
    ("sampling.window.policy", "wander", "must be 'frozen', 'progressive', 'decay', 'exp_decay', 'random' or 'list'"),
    ("sampling.mode.ratio", 0, "must be above 0"),
    ("sampling.mode.solver", "euler_a", "must be 'euler', 'heun', 'dpmpp_1m'"),
    ("model.family", "flux", "must be 'starter'"),
    ("model.precision", "float16", "must be 'float32', 'bfloat16' or 'float64'"),
    ("name", "../evil", "may hold up to 64 letters, digits, _ and -"),
    ("name", "", "may hold up to 64 letters, digits, _ and -"),
    ("prompts", [], "needs at least 1 entry"),
    ("prompts", "a red circle", "must be a list"),
    ("prompts", ["a", "  "], "prompt 1 is empty; every prompt must say what to draw"),
    ("prompts.0", 5, "must be text"),
    ("negative_prompt", None, "must be text"),
    ("rewards", [], "needs at least 1 entry"),
    ("rewards", {"scorer": "scene_accuracy"}, "must be a list"),
    ("rewards.0.weight", 0, "must be above 0"),
    ("rewards.0.options", [], "must be a mapping"),
    ("rewards.0.options.partial", [1], "must be true or false, a finite number, or text"),
    ("rewards.0.options.partial", math.nan, "must be true or false, a finite number, or text"),
    ("sampling", [], "must be a mapping of fields"),
]


@pytest.mark.parametrize(("path", "value", "allowed"), REFUSED)
def test_a_value_outside_its_range_is_refused_with_field_and_range(path, value, allowed):
    with pytest.raises(SpecError) as refused:
        parse_job(job(path, value))
    sentence = str(refused.value)
    field = sentence.split(": ")[0]
    assert field == path or field.startswith(f"{path}.") and isinstance(value, dict)
    assert sentence.startswith(f"{field}: {allowed}") and "\n" not in sentence
    assert sentence.count(f"{field}: ") == 1 and "; rewards:" not in sentence  # one fault, one clause


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("sampling.window", {"start": 21, "size": 4}, "sampling: a window of 4 from step 21 does not fit 25 steps"),
        ("sampling.window.size", 25, "sampling: a window of 25 from step 0 does not fit 25 steps: start + size may be at most"),
        ("optimizer.updates_per_rollout", 5, "job: group_size 12 cannot be split into 5 equal updates; choose"),
        ("optimizer.updates_per_rollout", 24, "job: group_size 12 cannot be split into 24 equal updates; choose"),
        ("advantage.mixing", "reward", "job: advantage.mixing reward mixes several rewards, and there is one; leave"),
        ("advantage.mixing", "gdpo", "job: advantage.mixing gdpo mixes several rewards, and there is one; leave"),
        ("advantage.trim", 0.08, "job: advantage.trim 0.08 leaves 0 of group_size 12 out of the statistics; choose"),
        ("advantage.trim", 0.95, "job: advantage.trim 0.95 leaves 11 of group_size 12 out of the statistics; choose"),
        ("advantage.best_and_worst", 3, "job: advantage.best_and_worst 3 must be even and less than group_size 12; leave"),
        ("advantage.best_and_worst", 12, "job: advantage.best_and_worst 12 must be even and less than group_size 12; leave"),
        ("advantage.best_and_worst", 6, "job: advantage.best_and_worst 6 cannot be split into 4 equal updates; choose"),
        ("objective.trained_steps", 4, "job: objective.trained_steps 4 must be less than the window's 4 steps; leave it out"),
        ("monitors", [{"scorer": "scene_accuracy"}], "job: scorer scene_accuracy is named twice; name each scorer once"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(path, value, sentence):
    with pytest.raises(SpecError) as refused:
        parse_job(job(path, value))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("path", ["learning_rate", "sampling.cfg", "sampling.window.stop", "rewards.0.wieght", "lora.dropout"])
def test_a_misspelt_field_is_refused_by_name(path):
    with pytest.raises(SpecError) as refused:
        parse_job(job(path, 1))
    assert str(refused.value) == f"{path}: there is no such field; check the spelling"


def test_every_fault_is_named_at_once():
    fields = job("sampling.steps", 1) | {"group_size": 1, "colour": "red"}
    del fields["rewards"]
    with pytest.raises(SpecError) as refused:
        parse_job(fields)
    assert sorted(clause.split(":")[0] for clause in str(refused.value).split("; ") if ": " in clause) == [
        "colour", "group_size", "rewards", "sampling.steps",
    ]  # fmt: skip


@pytest.mark.parametrize("fields", [[], "prompts", None, 3])
def test_a_job_is_a_mapping(fields):
    with pytest.raises(SpecError, match="a job is a mapping of fields, got"):
        parse_job(fields)


BOUND_TO_OTHERS = {
    "sampling.window.start", "sampling.window.size", "optimizer.updates_per_rollout", "advantage.best_and_worst",
    "objective.trained_steps",
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(WHOLE_NUMBERS.keys() - BOUND_TO_OTHERS))
def test_the_bounds_themselves_are_allowed(path):
    for bound in WHOLE_NUMBERS[path]:
        fields = job(path, bound)
        fields.setdefault("optimizer", {})["updates_per_rollout"] = 1
        fields.setdefault("sampling", {}).setdefault("window", {})["size"] = 1
        parse_job(fields)


def test_a_job_is_frozen_and_survives_json():
    spec = parse_job(job("sampling.shift", "dynamic"))
    with pytest.raises(ValidationError):
        spec.iterations = 5
    with pytest.raises(ValidationError):
        spec.sampling.window.size = 5
    again = parse_job(json.loads(json.dumps(spec.model_dump(mode="json"))))
    assert again == spec and again.identity() == spec.identity()


def test_the_identity_is_of_what_determines_the_numbers():
    """Every field of a job is in the identity, except how far, how often saved and shown, how split into calls, and the name."""
    plain = parse_job(job())
    free = {"name": "other", "iterations": 7, "rows_per_call": 5, "gradient_checkpointing": True}
    free |= {"checkpoint_every": 3, "keep_checkpoints": 9, "keep_loras_every": 4, "groups_at_once": 3, "offload": True}
    free |= {"fixed_pictures": 0}
    assert parse_job(job() | free).identity() == plain.identity()
    changed = {
        "model": {"precision": "bfloat16"},
        "prompts": ["a blue circle on a white background"],
        "negative_prompt": "a triangle",
        "sampling": {"eta": 0.5},
        "group_size": 16,
        "prompts_per_iteration": 4,
        "rewards": [{"scorer": "scene_accuracy", "options": {"partial": True}}],
        "monitors": [{"scorer": "held_out_judge"}],
        "lora": {"rank": 8},
        "optimizer": {"learning_rate": 1e-3},
        "ema": {"every": 2},
        "advantage": {"std": "global"},
        "objective": {"kl": {"weight": 1e-3}},
        "seed": 1,
    }
    assert changed.keys() | free.keys() == TrainSpec.model_fields.keys()
    identities = {name: parse_job(job() | {name: value}).identity() for name, value in changed.items()}
    assert len({plain.identity(), *identities.values()}) == len(changed) + 1


def test_identities_stay_what_they_are():
    """Runs on disk are found by them: a new field must have a default that changes nothing, and no default may change."""
    assert parse_job(job()).identity() == "7b3cd3ea48323d3d"
    example = load_job(Path(__file__).parents[2] / "workflows" / "jobs" / "starter.yaml")
    assert example.identity() == "0f2ac683e1306504"
    assert parse_job(job("lora.start_from", None)).identity() == parse_job(job()).identity()
    one, other, shouted = (parse_job(job("lora.start_from", digit * 64)) for digit in "abA")
    assert len({parse_job(job()).identity(), one.identity(), other.identity()}) == 3 and shouted == one


def test_what_is_left_out_and_what_is_written_out_are_the_same_job():
    written = {"policy": "progressive", "size": 4, "start": 0, "stride": 0, "every": 25, "end": "hold"}
    assert parse_job(job("sampling.window", written)).identity() == parse_job(job("sampling.window", {})).identity()
    assert parse_job(job("lora.rank", 16)).identity() == parse_job(job()).identity()
    kl = {"weight": 0.1, "space": "velocity"}
    assert parse_job(job("objective.kl", kl)).identity() == parse_job(job("objective.kl.weight", 0.1)).identity()
    for off in ("advantage.best_and_worst", "objective.kl", "objective.trained_steps", "optimizer.clip_range_high"):
        assert parse_job(job(off, None)).identity() == parse_job(job()).identity()


def test_a_clip_range_with_equal_ends_is_the_symmetric_one():
    symmetric = parse_job(job("optimizer.clip_range", 1e-3))
    assert parse_job(job("optimizer", {"clip_range": 1e-3, "clip_range_high": 1e-3})) == symmetric
    assert parse_job(job("optimizer", {"clip_range": 1e-3, "clip_range_high": 2e-3})).identity() != symmetric.identity()


def test_every_setting_of_the_objective_counts_for_the_identity():
    two = job("rewards", [{"scorer": "scene_accuracy"}, {"scorer": "jpeg_compressibility"}])
    changes = [
        ("advantage", {"mixing": "reward"}), ("advantage", {"mixing": "gdpo"}), ("advantage", {"std": "global"}),
        ("advantage", {"std_floor": 1e-3}), ("advantage", {"trim": 0.25}), ("advantage", {"best_and_worst": 4}),
        ("objective", {"step_weights": "inverse_dt"}), ("objective", {"trained_steps": 2}),
        ("objective", {"kl": {"weight": 0.1}}), ("objective", {"kl": {"weight": 0.1, "space": "mean"}}),
    ]  # fmt: skip
    identities = {parse_job(two | {name: value}).identity() for name, value in changes}
    assert len(identities | {parse_job(two).identity()}) == len(changes) + 1


@pytest.mark.parametrize(
    ("advantage", "sentence"),
    [
        ({"std": "global", "mixing": "gdpo"}, "advantage.std global does nothing under gdpo"),
        ({"std": "global"}, "advantage.std global is the group's own with prompts_per_iteration 1"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(advantage, sentence):
    two = job("rewards", [{"scorer": "scene_accuracy"}, {"scorer": "jpeg_compressibility"}]) | {"prompts_per_iteration": 1}
    with pytest.raises(SpecError, match=f"^job: {sentence}"):
        parse_job(two | {"advantage": advantage})


def test_the_same_number_in_other_words_is_the_same_job():
    assert parse_job(job("sampling.shift", 3)).identity() == parse_job(job("sampling.shift", 3.0)).identity()
    assert parse_job(job("sampling.eta", "0.7")) == parse_job(job())


# ------------------------------------------------------------------ files


def test_yaml_and_json_files_give_the_same_job(tmp_path):
    """1e-4 without a dot is text in YAML 1.1, and JSON may be indented with tabs, which YAML refuses."""
    text = "prompts: [a red circle]\nrewards:\n  - scorer: jpeg_compressibility\noptimizer: {learning_rate: 1e-4}\n"
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    fields = {"prompts": ["a red circle"], "rewards": [{"scorer": "jpeg_compressibility"}], "optimizer": {"learning_rate": 1e-4}}
    (tmp_path / "job.json").write_text(json.dumps(fields, indent="\t"), encoding="utf-8")
    spec = load_job(tmp_path / "job.yaml")
    assert spec == load_job(tmp_path / "job.json") and spec.optimizer.learning_rate == 1e-4


def test_prompts_beyond_ascii_are_kept(tmp_path):
    prompt = "ein roter Kreis über einem Würfel 🎈"
    for name, text in {"a.yaml": f"prompts: ['{prompt}']\nrewards: [{{scorer: x}}]\n", "a.json": None}.items():
        fields = {"prompts": [prompt], "rewards": [{"scorer": "x"}]}
        (tmp_path / name).write_text(text or json.dumps(fields), encoding="utf-8")
        assert load_job(tmp_path / name).prompts == (prompt,)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.yaml", b"prompts: [a red circle"),
        ("code.yaml", b"prompts: !!python/object/apply:os.system ['echo hacked > hacked']"),
        ("date.yaml", b"seed: 2026-13-45"),
        ("binary.yaml", b"\xff\xfe\x00\x00"),
        ("cut.json", b'{"prompts": ['),
        ("deep.json", b"[" * 100_000),
    ],
)
def test_an_unreadable_job_file_is_refused_in_one_line(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=f"^cannot read the job file .*{name}: ") as refused:
        load_job(tmp_path / name)
    assert "\n" not in str(refused.value) and not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("text", "key", "line", "before"),
    [
        ("seed: 1\nprompts: [a]\nseed: 2\n", "seed", 3, 1),
        ('prompts: [a]\nlora:\n  rank: 4\n  # more\n  "rank": 8\n', "rank", 5, 3),
        ("rewards: [{scorer: x, weight: 1, weight: 2}]\n", "weight", 1, 1),
        ("seed: 1\n? seed\n: 1\n", "seed", 2, 1),
    ],
)
def test_a_key_given_twice_is_refused_with_its_lines(tmp_path, text, key, line, before):
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=f"job.yaml: '{key}' in line {line} was given in line {before} already; keep one"):
        load_job(tmp_path / "job.yaml")


def test_the_same_key_in_different_places_and_a_merge_are_no_repetition(tmp_path):
    """What a merge brings in may be given anew, however deep the merged mapping lies."""
    text = """
prompts: [a red circle]
rewards:
  - &first {scorer: one, weight: 1, options: &options {partial: true}}
  - {<<: *first, scorer: two, weight: 2}
monitors:
  - {scorer: three, weight: 3, options: {<<: *options, partial: false}}
"""
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    spec = load_job(tmp_path / "job.yaml")
    assert [(one.scorer, one.weight) for one in (*spec.rewards, *spec.monitors)] == [("one", 1), ("two", 2), ("three", 3)]
    assert [one.options["partial"] for one in (*spec.rewards, *spec.monitors)] == [True, True, False]


def test_a_missing_job_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(SpecError, match="cannot read the job file .*No such file"):
        load_job(tmp_path / "job.yaml")
    with pytest.raises(SpecError, match="cannot read the job file"):
        load_job(tmp_path)


def test_an_empty_job_file_is_no_job(tmp_path):
    (tmp_path / "job.yaml").write_text("", encoding="utf-8")
    with pytest.raises(SpecError, match="a job is a mapping of fields, got NoneType"):
        load_job(tmp_path / "job.yaml")


def test_sampling_alone_is_parsed_in_the_same_words():
    assert parse_sampling({"steps": 8, "window": {"size": 2}}).steps == 8
    with pytest.raises(SpecError, match="^steps: must be at least 2 "):
        parse_sampling({"steps": 1})
