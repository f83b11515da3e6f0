"""GRPO Train Step in a running ComfyUI, with a real backend and real workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from graph_server import GraphError, GraphServer
from train_graphs import CAPTION, drawing, node, train_graph
from waiting import until

from mixgrpo.backend.client import Backend
from mixgrpo.backend.places import read_state
from mixgrpo.backend.specs.job import parse_job

FOREVER = 100_000  # iterations that no test waits for


def ask(server: GraphServer, question: str, *arguments: Any) -> Any:
    """Ask the backend that the graphs have started."""
    state = read_state(server.data)
    return asyncio.run(getattr(Backend(state["address"], state["token"]), question)(*arguments))


def trained(outputs: dict[str, Any]) -> dict[str, Any]:
    (summary,) = outputs["train"]["mixgrpo_train"]
    return summary


def run_folder(server: GraphServer, job: str) -> Path:
    return server.data / "runs" / job


def starts(server: GraphServer, job: str) -> list[int]:
    """The iterations from which workers have begun."""
    events = map(json.loads, (run_folder(server, job) / "events.jsonl").read_text().splitlines())
    return [event["from_iteration"] for event in events if event["event"] == "start"]


def job_of(server: GraphServer, name: str) -> dict[str, Any] | None:
    """The job of a name, as soon as the backend has it."""
    if read_state(server.data) is None:
        return None
    return next((job for job in ask(server, "jobs") if job["name"] == name), None)


def job_at(server: GraphServer, name: str, iteration: int) -> dict[str, Any]:
    """The job of a name, once so many iterations are trained."""
    return until(
        lambda: (job := job_of(server, name)) and job["iteration"] >= iteration and job, f"iteration {iteration} of {name}"
    )


def cached(history: dict[str, Any]) -> list[str]:
    return next(message["nodes"] for name, message in history["status"]["messages"] if name == "execution_cached")


def test_the_trained_lora_is_applied_in_the_same_graph(server: GraphServer):
    graph = train_graph(name="applied") | drawing(["patched", 0])
    outputs = server.run(graph)
    summary = trained(outputs)
    assert summary["state"] == "done" and summary["iteration"] == summary["lora_iteration"] == 2
    assert summary["curve"]["iteration"] == [1, 2] and summary["reward"] == summary["curve"]["reward"][-1]
    assert outputs["train"]["images"], "the node shows no pictures"
    drawn = server.latent(outputs, "picture_saved")

    base = server.latent(server.run(train_graph(name="applied") | drawing(["starter", 0])), "picture_saved")
    assert (drawn - base).norm() > 1e-4 * base.norm()

    stock = {"stock": node("LoraLoaderModelOnly", model=["starter", 0], lora_name=summary["lora"], strength_model=1.0)}
    loaded = server.run(train_graph(name="applied") | stock | drawing(["stock", 0]))
    assert torch.equal(server.latent(loaded, "picture_saved"), drawn)
    assert summary["lora"] in server.get("/object_info/LoraLoader")["LoraLoader"]["input"]["required"]["lora_name"][0]


def test_the_same_n_trains_nothing_and_a_larger_one_continues(server: GraphServer):
    first = trained(server.run(train_graph(name="again", seed=21)))
    history = server.wait(server.queue(train_graph(name="again", seed=21)))
    assert "train" in cached(history) and history["outputs"]["train"]["mixgrpo_train"] == [first]

    server.fetch("/free", {"unload_models": True, "free_memory": True})  # ComfyUI forgets what it has cached
    time.sleep(1.5)
    history = server.wait(server.queue(train_graph(name="again", seed=21)))
    assert "train" not in cached(history)
    assert starts(server, first["job"]) == [0]

    more = trained(server.run(train_graph(name="again", seed=21, iterations=3)))
    assert more["job"] == first["job"] and more["lora_iteration"] == 3 and more["lora"] != first["lora"]
    assert starts(server, first["job"]) == [0, 2]
    fewer = trained(server.run(train_graph(name="again", seed=21, iterations=1)))
    assert fewer["lora_iteration"] == 1 and starts(server, first["job"]) == [0, 2]


def test_a_changed_setting_is_another_training(server: GraphServer):
    job = trained(server.run(train_graph(name="changed")))["job"]
    changed = train_graph(name="changed", iterations=1, sampling={"eta": 0.5}, optimizer={"clip_range": 1e-2})
    assert trained(server.run(changed))["job"] != job


def test_names_and_intervals_do_not_train_again(server: GraphServer):
    first = trained(server.run(train_graph(name="one", seed=22)))
    second = trained(server.run(train_graph(name="two", seed=22, checkpoint_every=2, unload_models=False)))
    assert second["job"] == first["job"] and len(starts(server, first["job"])) == 1


def test_interrupt_returns_within_two_seconds_and_queueing_again_continues(server: GraphServer):
    graph = train_graph(name="interrupted", seed=11, iterations=FOREVER, checkpoint_every=FOREVER)
    running = server.queue(graph)
    job = job_at(server, "interrupted", 2)
    before = time.monotonic()
    server.fetch("/interrupt", {"prompt_id": running})
    history = server.wait(running)
    assert time.monotonic() - before < 2
    assert "execution_interrupted" in json.dumps(history["status"]["messages"])
    paused = until(lambda: (found := ask(server, "job", job["id"]))["state"] == "paused" and found, "the pause")
    assert paused["loras"] == [paused["iteration"]], "a pause saves what was trained"

    done = trained(server.run(train_graph(name="interrupted", seed=11, iterations=paused["iteration"] + 1)))
    assert starts(server, job["id"]) == [0, paused["iteration"]] and done["lora_iteration"] == paused["iteration"] + 1


def test_a_graph_whose_job_somebody_pauses_says_so(server: GraphServer):
    running = server.queue(train_graph(name="paused", seed=12, iterations=FOREVER))
    job = job_at(server, "paused", 1)
    ask(server, "pause", job["id"])
    with pytest.raises(GraphError, match=rf"job {job['id']} is paused at iteration \d+ of {FOREVER}; queue this graph again"):
        server.result(running)


def test_without_waiting_the_graph_goes_on_with_the_newest_lora(server: GraphServer):
    settings = {"name": "alone", "seed": 13, "iterations": FOREVER, "wait": False}
    outputs = server.run(train_graph(**settings) | drawing(["patched", 0]))
    early = trained(outputs)
    assert (early["lora"] == "") == (early["lora_iteration"] == 0)
    job = job_at(server, "alone", early["lora_iteration"] + 2)
    assert job["detached"]
    later = trained(server.run(train_graph(**settings) | drawing(["patched", 0])))
    assert later["lora_iteration"] > early["lora_iteration"] and later["lora"].endswith(
        f"{later['lora_iteration']:06d}.safetensors"
    )
    assert len(starts(server, job["id"])) == 1, "asking again must not train again"
    ask(server, "cancel", job["id"])
    until(lambda: ask(server, "job", job["id"])["state"] == "cancelled", "the end of the job")


def test_a_backend_that_dies_is_replaced(server: GraphServer):
    running = server.queue(train_graph(name="killed", seed=14, iterations=40))
    job = job_at(server, "killed", 2)
    os.kill(read_state(server.data)["pid"], signal.SIGKILL)
    summary = trained(server.result(running))
    assert summary["job"] == job["id"] and summary["lora_iteration"] == 40
    assert summary["curve"]["iteration"] == list(range(1, 41))


def test_modes_and_policies_reach_the_trainer(server: GraphServer):
    window = {"window_policy": "random", "window_start": 1, "window_stride": 3, "mode": ["mode", 0]}
    mode = node("MixGRPO_SamplingMode", dynamics="cps", log_prob="variance_free", solver="euler", solver_after="dpmpp_2m",
                history="reset", ratio=0.5)  # fmt: skip
    made = trained(server.run(train_graph(name="modes", iterations=1, sampling=window | {"steps": 6}) | {"mode": mode}))
    sampling = ask(server, "job", made["job"])["spec"]["sampling"]
    assert sampling["mode"] == mode["inputs"]
    assert {name: value for name, value in sampling["window"].items() if value is not None} == {
        "policy": "random", "size": 1, "first": 1,
    }  # fmt: skip


REFUSALS = {
    "no prompt": ({"prompts": " \n "}, "there is no prompt to train on"),
    "bad name": ({"name": "../up"}, "name: may hold up to 64 letters"),
    "group": ({"group_size": 3, "optimizer": {"updates_per_rollout": 2}}, "group_size 3 cannot be split into 2 equal updates"),
    "window": ({"sampling": {"window_size": 4}}, "a window of 4 from step 0 does not fit 4 steps"),
    "schedule": ({"sampling": {"schedule": "kharas"}}, "shift: must be a finite number above 0, or the word dynamic"),
    "alias": ({"backend": "nowhere"}, "there is no backend called 'nowhere'; known: local"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_settings_that_cannot_work_are_refused_with_a_sentence(server: GraphServer, name):
    changes, sentence = REFUSALS[name]
    with pytest.raises(GraphError, match=sentence):
        server.run(train_graph(**changes))


def test_a_worker_that_fails_speaks_for_itself(server: GraphServer):
    graph = train_graph(name="cat", prompts="a cat") | {"reward": node("MixGRPO_SceneAccuracy", weight=1.0, partial=False)}
    with pytest.raises(GraphError, match="MixGRPO_TrainStep: .*'a cat' is not a caption of the starter world"):
        server.run(graph)


def test_a_reward_that_is_held_out_is_refused(server: GraphServer):
    graph = train_graph(name="judged") | {"reward": node("MixGRPO_HeldOutJudge", weight=1.0)}
    with pytest.raises(GraphError, match="held_out_judge is held out: it may only be watched"):
        server.run(graph)


def test_monitors_are_watched(server: GraphServer):
    graph = train_graph(name="watched", monitors=["judge", 0]) | {"judge": node("MixGRPO_HeldOutJudge", weight=1.0)}
    assert set(trained(server.run(graph))["curve"]["scores"]) == {"jpeg_compressibility", "held_out_judge"}


def test_a_run_folder_in_use_is_named(server: GraphServer):
    job = trained(server.run(train_graph(name="used", seed=15, iterations=1)))["job"]
    with FileLock(run_folder(server, job) / ".lock"), pytest.raises(GraphError, match="is in use by another process"):
        server.run(train_graph(name="used", seed=15, iterations=2))
    assert trained(server.run(train_graph(name="used", seed=15, iterations=2)))["lora_iteration"] == 2


def test_remote_backends_that_do_not_answer_or_do_not_know_the_token(server: GraphServer):
    server.run(train_graph())
    server.config.mkdir(exist_ok=True)
    settings = server.config / "backends.yaml"
    address = read_state(server.data)["address"]
    wrong = "wrong-token-of-sixteen-letters"
    remotes = {"dead": {"address": "http://127.0.0.1:9", "token": wrong}, "stranger": {"address": address, "token": wrong}}
    settings.write_text(json.dumps({"backends": remotes}))
    settings.chmod(0o600)
    try:
        with pytest.raises(GraphError, match="the backend at http://127.0.0.1:9 does not answer"):
            server.run(train_graph(backend="dead"))
        with pytest.raises(GraphError, match="the token is missing or wrong"):
            server.run(train_graph(backend="stranger"))
        assert wrong not in server.log
    finally:
        settings.unlink()


def test_load_lora_by_job(server: GraphServer):
    made = trained(server.run(train_graph(name="loaded", iterations=3)))

    def load(**widgets: Any) -> dict[str, Any]:
        settings = {"job": made["job"], "which": "latest", "iteration": 0, "strength": 1.0, "backend": "local"} | widgets
        graph = {"starter": node("MixGRPO_StarterModel"), "load": node("MixGRPO_LoadLora", model=["starter", 0], **settings)}
        return server.run(graph | drawing(["load", 0]))

    def name(outputs: dict[str, Any]) -> str:
        return outputs["load"]["mixgrpo_lora"][0]["lora"]

    assert name(load()) == made["lora"] and name(load(job="loaded")) == made["lora"]
    assert name(load(which="best")).endswith(f"{made['best']:06d}.safetensors")
    assert name(load(which="iteration", iteration=2)).endswith("000002.safetensors")
    base = load(which="iteration", iteration=0)
    assert name(base) == "" and torch.equal(
        server.latent(base, "picture_saved"), server.latent(load(strength=0.0), "picture_saved")
    )
    for widgets, sentence in [
        ({"job": "nobody"}, "there is no job 'nobody' on this backend; the newest are: "),
        ({"which": "iteration", "iteration": 9}, "has no LoRA of iteration 9; there are: 1, 2, 3"),
        ({"which": "newest"}, "'which' may be latest, best, iteration|value_not_in_list"),
    ]:
        with pytest.raises(GraphError, match=sentence):
            load(**widgets)


def test_load_lora_runs_again_when_the_job_has_a_newer_one(server: GraphServer):
    widgets = {"job": "newer", "which": "latest", "iteration": 0, "strength": 1.0, "backend": "local"}
    graph = {"starter": node("MixGRPO_StarterModel"), "load": node("MixGRPO_LoadLora", model=["starter", 0], **widgets)}

    def load() -> dict[str, Any]:
        return server.wait(server.queue(graph | drawing(["load", 0])))

    server.run(train_graph(name="newer", seed=16, iterations=1))
    assert load()["outputs"]["load"]["mixgrpo_lora"][0]["lora"].endswith("000001.safetensors")
    assert "load" in cached(load()), "the same LoRA is loaded again"
    server.run(train_graph(name="newer", seed=16, iterations=2))
    assert load()["outputs"]["load"]["mixgrpo_lora"][0]["lora"].endswith("000002.safetensors")


def test_a_training_starts_from_a_lora_of_the_list(server: GraphServer):
    first = trained(server.run(train_graph(name="first", seed=18)))
    start = {"name": "second", "start_from": first["lora"]}
    second = trained(server.run(train_graph(**start, iterations=1)))
    assert second["job"] != first["job"]
    spec = ask(server, "job", second["job"])["spec"]
    file = server.base / "output" / "loras" / first["lora"]
    assert spec["lora"]["start_from"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert "train" in cached(server.wait(server.queue(train_graph(**start, iterations=1))))

    graph = train_graph(**start, iterations=2) | {
        "lora_settings": node("MixGRPO_LoraSettings", rank=4, alpha=4.0, targets="attention", rslora=False)
    }
    with pytest.raises(GraphError, match="rank"):
        server.run(graph)
    for name in ("../../secret.safetensors", "/etc/passwd", "nothing.safetensors"):
        with pytest.raises(GraphError, match="start_from: there is no LoRA|value_not_in_list"):
            server.run(train_graph(start_from=name))


def test_a_file_of_the_same_name_is_never_overwritten(server: GraphServer):
    made = trained(server.run(train_graph(name="kept", seed=17)))
    file = server.base / "output" / "loras" / made["lora"]
    file.write_bytes(b"somebody's own")
    server.fetch("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1.5)
    again = trained(server.run(train_graph(name="kept", seed=17, unload_models=False)))
    assert again["lora"] != made["lora"] and file.read_bytes() == b"somebody's own"


def test_the_graphs_job_is_the_command_lines(server: GraphServer):
    """The same words in a job file have the same identity, so neither trains what the other has trained."""
    made = trained(server.run(train_graph(name="words")))
    spec = parse_job(
        {
            "prompts": [CAPTION],
            "sampling": {"steps": 4, "window": {"size": 1}},
            "group_size": 2,
            "prompts_per_iteration": 1,
            "rewards": [{"scorer": "jpeg_compressibility"}],
            "lora": {"rank": 2, "alpha": 4},
            "optimizer": {"learning_rate": 1e-3, "clip_range": 1e-3, "updates_per_rollout": 1},
        }
    )
    assert spec.identity() == made["job"]
