"""Four gloo ranks, as one machine and as two of two, against one rank: whole groups, and groups that are split."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from four_ranks import CASES, MISFITS
from training_jobs import ENVIRONMENT, job
from two_ranks import first_gradient, trained_before

from mixgrpo.backend.files import load_tensors
from mixgrpo.backend.train.ranks import Ranks
from mixgrpo.backend.train.trainer import Trainer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """What four real processes wrote: two launchers with two each, as on two machines, so replicas of two shards."""
    folder = tmp_path_factory.mktemp("four_ranks")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=0"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=four"]
    command = [*launcher, *meeting, str(Path(__file__).with_name("four_ranks.py")), str(folder)]
    machines = [
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]
    try:
        for machine in machines:
            said, _ = machine.communicate(timeout=300)
            assert machine.returncode == 0, said[-4000:]
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()
    return folder


def facts(out: Path) -> list[dict]:
    return [json.loads((out / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


def alone(number: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    return first_gradient(job(**list(CASES.values())[number]), Ranks.join())


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_the_gradient_of_four_ranks_is_that_of_one(out, number):
    four, (one, _) = load_tensors(out / f"gradient_{number}.safetensors"), alone(number)
    assert four.keys() == one.keys()
    together, single = (torch.cat([tensors[name].flatten().double() for name in sorted(one)]) for tensors in (four, one))
    bound = 2e-2 if "bfloat16" in list(CASES)[number] else 1e-10
    assert single.norm() > 0 and (together - single).norm() / single.norm() <= bound


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_every_rank_makes_the_same_calls_and_a_split_groups_prefix_is_counted_on_each(out, number):
    rows = [said["rows"][number] for said in facts(out)]
    assert all(other == rows[0] for other in rows)
    spec, (_, single) = job(**list(CASES.values())[number]), alone(number)
    together = {phase: 4 * count for phase, count in rows[0].items()}
    if spec.prompts_per_iteration == 4 or not spec.sampling.shared_noise:
        assert together == single
    else:  # the window begins at the first step, whose call is one row on every rank; so is its replay
        more = 4 - spec.prompts_per_iteration
        assert together["rollout"] == single["rollout"] + more
        assert together["training"] == single["training"] + more


def test_ranks_agree_and_replicate_over_machines(out):
    first, *others = facts(out)
    assert all(other["iteration"] == first["iteration"] and other["resumed"] == first["resumed"] for other in others)
    assert first["resumed"] == first["iteration"]["adapter_hash"]
    assert first["mesh"] == [2, 2]


def test_the_average_is_that_of_one_rank_and_is_continued(out):
    hashes = [said["averages"] for said in facts(out)]
    assert all(other == hashes[0] for other in hashes) and hashes[0][0] == hashes[0][1]
    spec = job(**list(CASES.values())[-1])
    one = Trainer(spec, Ranks.join(), trained_before(spec))
    one.train_iteration()
    averages = (load_tensors(out / "ema.safetensors"), one.checkpoint().ema)
    four, single = (torch.cat([tensors[name].flatten() for name in sorted(tensors)]) for tensors in averages)
    assert (four - single).norm() / single.norm() < 1e-8


def test_what_cannot_be_divided_is_refused_on_every_rank(out):
    for said in facts(out):
        assert all(part in sentence for part, sentence in zip(MISFITS, said["refused"], strict=True))
