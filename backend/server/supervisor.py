"""The queue: takes jobs in, gives one at a time to a worker process, and settles what became of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MixGRPOError
from ..models.weights import base_model_hash
from ..specs import TrainSpec
from ..specs.job import parse_job
from ..train.run_folder import RunError, RunFolder
from .loras import LoraFiles
from .runs import Run
from .store import ACTIVE, WORKING, Job, JobStore, State

BOOTSTRAP = Path(__file__).resolve().parents[1] / "bootstrap.py"
_CANCEL_GRACE = 10.0  # seconds for a worker to end by itself, then for the system to end it
_POLL = 0.2


class JobConflict(MixGRPOError):
    """What was asked does not go together with how far the job is."""


@dataclass(frozen=True)
class Attempt:
    """How things stood when a worker was started: its first log byte, and the newest checkpoint."""

    log_offset: int
    reached: int


class Supervisor:
    """Owns the job store and the worker process. All methods run on one event loop."""

    def __init__(self, store: JobStore, runs: Path, loras: LoraFiles):
        self.store, self.runs_folder, self.loras = store, runs, loras
        self._runs: dict[str, Run] = {}
        self._wake = asyncio.Event()
        self._worker: asyncio.subprocess.Process | None = None
        self._endings: set[asyncio.Task[None]] = set()

    def run(self, job_id: str) -> Run:
        """The run folder of a job."""
        return self._runs.setdefault(job_id, Run(self.runs_folder / job_id))

    # ------------------------------------------------------------------ what a client asks

    def check_base_model(self, spec: TrainSpec) -> None:
        """Raise :class:`JobConflict` when what there is of a job was trained on other base weights than the present ones.

        They are no part of a job's identity, so a finished LoRA of the old ones would be given back without a word. It may take
        seconds to read them; it is safe in a thread.
        """
        was = self.run(spec.identity()).base_model()
        if was is not None and was != (now := base_model_hash(spec.model)):
            raise JobConflict(
                f"job {spec.identity()} was trained on other weights of the base model ({was[:12]}, now {now[:12]}); put those "
                "back, or change the job, its seed for example, to train anew on the present ones"
            )

    def submit(self, spec: TrainSpec, detached: bool) -> Job:
        """Take a job in: attach to it while it goes on, give back what is finished, continue it, or begin it.

        Raises:
            JobConflict: the job is further than ``spec.iterations`` and has no LoRA of that iteration.
            RunError: another process uses its run folder.
            UnknownLora: it begins with a LoRA file that is not here.
        """
        job_id, fields = spec.identity(), spec.model_dump(mode="json")
        job, run = self.store.find(job_id), self.run(job_id)
        if job is not None and job.state in ACTIVE:
            return self._attach(job, spec, detached)
        loras, reached = run.loras(), run.reached()
        if spec.iterations in loras:
            RunFolder(run.path).want(spec.iterations)
            return self.store.put(job_id, fields, State.DONE, detached)
        if reached > spec.iterations:
            known = ", ".join(map(str, sorted(loras))) or "none"
            raise JobConflict(
                f"job {job_id} is already trained to iteration {reached} and keeps no LoRA of iteration {spec.iterations} "
                f"(there are: {known}); set iterations to one of these, or to {reached} or more"
            )
        if not reached and spec.lora.start_from is not None:
            self.loras.find(spec.lora.start_from)
        folder = RunFolder(run.path)
        folder.lock()  # refuses a folder that, say, `mixgrpo train --out` uses
        folder.want(spec.iterations)
        folder.unlock()
        job = self.store.put(job_id, fields, State.QUEUED, detached)
        self._wake.set()
        return job

    def _attach(self, job: Job, spec: TrainSpec, detached: bool) -> Job:
        farther = spec.model_copy(update={"iterations": max(spec.iterations, job.iterations)})
        stopping = job.state in (State.PAUSING, State.CANCELLING)
        fields = farther.model_dump(mode="json")
        RunFolder(self.run(job.id).path).want(spec.iterations)
        return self.store.change(job.id, spec=fields, detached=detached or job.detached, again=stopping or job.again)

    def pause(self, job_id: str) -> Job:
        """Stop a job at the next point that can be saved; a job that does not go on stays as it is."""
        return self._stop(self.store.get(job_id), State.PAUSING, State.PAUSED)

    def cancel(self, job_id: str) -> Job:
        """End a job now; its checkpoints stay, and submitting it again continues from the last one."""
        job = self.store.get(job_id)
        if job.state is State.PAUSED:
            return self.store.change(job_id, state=State.CANCELLED)
        job = self._stop(job, State.CANCELLING, State.CANCELLED)
        if job.state is State.CANCELLING and self._worker is not None:
            ending = asyncio.create_task(_end(self._worker))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        return job

    def _stop(self, job: Job, stopping: State, stopped: State) -> Job:
        if job.state is State.QUEUED:
            return self.store.change(job.id, state=stopped)
        if job.state not in WORKING or job.state is State.CANCELLING:
            return job
        RunFolder(self.run(job.id).path).request("cancel" if stopping is State.CANCELLING else "pause")
        return self.store.change(job.id, state=stopping, again=False)

    def pause_attached(self) -> None:
        """Pause everything that was not submitted to go on alone."""
        for job in self.store.in_states(ACTIVE):
            if not job.detached and job.state is not State.PAUSING:
                self.pause(job.id)

    @property
    def busy(self) -> bool:
        """Whether any job goes on or waits."""
        return bool(self.store.in_states(ACTIVE))

    # ------------------------------------------------------------------ the queue

    async def serve(self) -> None:
        """Work through the queue for ever, beginning with what an earlier server left unfinished."""
        for job in self.store.in_states(WORKING):
            await self._recover(job)
        while True:
            queued = self.store.in_states(frozenset({State.QUEUED}))
            if not queued:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._work(queued[0])

    async def _recover(self, job: Job) -> None:
        """A worker without a server pauses by itself; once the folder is free the job is settled, or queued again."""
        folder = RunFolder(self.run(job.id).path)
        while True:
            try:
                folder.lock()
                break
            except RunError:
                await asyncio.sleep(_POLL)
        folder.unlock()
        job, run = self.store.get(job.id), self.run(job.id)
        if job.iterations in run.loras():
            self.store.change(job.id, state=State.DONE)
        elif job.state is State.RUNNING or job.again:
            self.store.change(job.id, state=State.QUEUED, again=False)
        else:
            self.store.change(job.id, state=State.PAUSED if job.state is State.PAUSING else State.CANCELLED)

    async def _work(self, job: Job) -> None:
        run = self.run(job.id)
        try:
            digest = parse_job(job.spec).lora.start_from
            if digest is not None and not run.reached():
                await asyncio.to_thread(_put_start, RunFolder(run.path), self.loras.find(digest), digest)
                job = self.store.get(job.id)
                if job.state is not State.QUEUED:
                    return  # stopped meanwhile
            _prepare(RunFolder(run.path), parse_job(job.spec))
            attempt = Attempt(run.log.stat().st_size if run.log.exists() else 0, run.reached())
            self.store.change(job.id, state=State.RUNNING)
            self._worker = await _start_worker(run)
        except (MixGRPOError, OSError) as error:
            self.store.change(job.id, state=State.FAILED, error=f"the worker could not be started: {error}")
            return
        if self.store.get(job.id).state is State.CANCELLING:
            await _end(self._worker)  # asked while the process was being made
        code = await self._worker.wait()
        self._worker = None
        self._settle(self.store.get(job.id), run, attempt, code)

    def _settle(self, job: Job, run: Run, attempt: Attempt, code: int) -> None:
        """Decide what a job is after its worker has ended; ``code`` below 0 is the signal that ended it."""
        RunFolder(run.path).withdraw_request()
        stopped = {State.PAUSING: State.PAUSED, State.CANCELLING: State.CANCELLED}.get(job.state)
        if job.iterations in run.loras() and code == 0:
            self.store.change(job.id, state=State.DONE, again=False)
        elif stopped is not None and (code <= 0 or stopped is State.CANCELLED):
            self.store.change(job.id, state=State.QUEUED if job.again else stopped, again=False)
        elif code == 0 and (ended := _ended(run, job.iterations)) is not None:
            self.store.change(job.id, state=ended)
        elif code < 0 and run.reached() > attempt.reached:
            self.store.change(job.id, state=State.QUEUED)  # no end to this only while every attempt gets further
        else:
            said = run.last_words(attempt.log_offset)
            self.store.change(job.id, state=State.FAILED, error=_cause(code, said), last_words="\n".join(said))

    async def close(self, grace: float) -> None:
        """Let the worker pause, and leave it to itself when that takes longer; the next server continues the job."""
        if self._worker is None:
            return
        if self._worker.stdin is not None:
            self._worker.stdin.close()
        try:
            await asyncio.wait_for(self._worker.wait(), grace)
        except TimeoutError:
            return


def _prepare(folder: RunFolder, spec: TrainSpec) -> None:
    """Write the job into its folder, where the worker reads it, and forget what an earlier worker was asked."""
    folder.lock()
    try:
        folder.open(spec)
        folder.withdraw_request()
    finally:
        folder.unlock()


def _put_start(folder: RunFolder, lora: Path, digest: str) -> None:
    """Put the LoRA that a job starts from into its folder; it may take seconds to copy."""
    folder.lock()
    try:
        folder.put_start(lora, digest)
    finally:
        folder.unlock()


async def _start_worker(run: Run) -> asyncio.subprocess.Process:
    """A worker in a process group of its own; it pauses when its standard input, a pipe from here, ends."""
    environment = {name: value for name, value in os.environ.items() if name != "MIXGRPO_TOKEN"}
    with open(run.log, "ab") as log:
        options: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {}
        return await asyncio.create_subprocess_exec(
            *(sys.executable, str(BOOTSTRAP), "worker", str(run.path), "--supervised"),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=run.path,
            env=environment | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
            **options,
        )


async def _end(worker: asyncio.subprocess.Process) -> None:
    """Wait for a worker that was asked to end; then ask the system, at last without mercy, for all its processes."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        try:
            await asyncio.wait_for(worker.wait(), _CANCEL_GRACE)
            return
        except TimeoutError:
            _signal(worker, number)


def _signal(worker: asyncio.subprocess.Process, number: int) -> None:
    try:
        if os.name == "posix":
            os.killpg(worker.pid, number)
        else:
            worker.kill()
    except ProcessLookupError:
        return


def _ended(run: Run, iterations: int) -> State | None:
    """What the worker's last event makes of a job that nobody has asked to stop here; done: it is to go further by now."""
    run.refresh()
    last = run.history.last or {}
    if last.get("event") == "done":
        return State.QUEUED if last["iteration"] < iterations else None  # trained, and yet no LoRA: again would be for ever
    return {"paused": State.PAUSED, "cancelled": State.CANCELLED}.get(last.get("event", ""))


def _cause(code: int, said: list[str]) -> str:
    """One sentence for a failure, ending with the worker's own last line."""
    last = said[-1] if said else "it said nothing"
    if code == 0:
        return f"the worker said it was done, without the LoRA it was to make; submit the job again; its last words: {last}"
    if code > 0:
        return last if said else f"the worker ended with code {code} and said nothing"
    name = signal.Signals(-code).name if -code in {number.value for number in signal.Signals} else f"signal {-code}"
    memory = "; the system does so when memory runs out" if name == "SIGKILL" else ""
    return f"the worker was ended from outside ({name}{memory}) before a new checkpoint; its last words: {last}"
