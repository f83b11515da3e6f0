"""A job as a graph sees it: submit it, follow it, show how it goes, and stop waiting when the user interrupts.

Every prompt runs in an event loop of its own, and an interrupt does not reach a node that only awaits; so the waiting is
done here, looking at ComfyUI's flag ten times a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from ..backend.client import SETTLED, Backend, BackendError, BackendUnreachable, JobFailed, connect
from ..backend.errors import MixGRPOError
from ..backend.settings import LOCAL
from ..backend.specs import TrainSpec
from ..backend.specs.job import mixed_reward
from .artifacts import newest_sheet

_T = TypeVar("_T")
_POLL = 0.1
_PAUSE_SECONDS = 1.0
_SHEET_SECONDS = 1.0
_MESSAGE_SECONDS = 0.4


class TrainingStopped(MixGRPOError):
    """The job was paused or cancelled by somebody else while a graph waited for it."""


@dataclass(frozen=True)
class Order:
    """What a node asks for.

    Attributes:
        spec: the job.
        backend: a backend's alias.
        start_from: a LoRA file to begin with, or None.
        wait: follow the job to the end; else it goes on alone.
        unload_models: free the memory of ComfyUI's models first, when the job runs on this machine.
    """

    spec: TrainSpec
    backend: str
    start_from: Path | None
    wait: bool
    unload_models: bool


async def unless_interrupted(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``; when the user interrupts, or another node fails, the work is cancelled within a second or so."""
    import comfy.model_management

    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_POLL)
            comfy.model_management.throw_exception_if_processing_interrupted()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_PAUSE_SECONDS + _POLL)


async def train(order: Order) -> tuple[Backend, dict[str, Any]]:
    """Submit the job and, if wanted, wait until it is trained; returns the backend and the job.

    A backend that dies meanwhile is started or asked again, as long as the job has got further since the last time.

    Raises:
        JobFailed: with the worker's last words.
        TrainingStopped: somebody paused or cancelled the job.
        BackendError, BackendUnreachable, PlaceError: the backend refuses, or there is none.
    """
    display = _Display(order)
    reached = -1
    while True:
        backend = await connect(order.backend)
        spec = await _with_start(order, backend)
        job = await backend.submit(spec.model_dump(mode="json"), detached=not order.wait)
        if order.unload_models and order.backend == LOCAL and job["state"] not in SETTLED:
            _unload_models()
        if not order.wait:
            return backend, job
        try:
            return backend, await _follow(backend, job, order.spec.iterations, display)
        except BackendUnreachable as lost:
            if display.iteration <= reached:
                raise
            reached = display.iteration
            logging.warning("MixGRPO: %s; asking again", lost)


async def _with_start(order: Order, backend: Backend) -> TrainSpec:
    """The job, naming the LoRA that it starts from by its content; the backend has the file then."""
    if order.start_from is None:
        return order.spec
    digest = await backend.upload_lora(order.start_from)
    return order.spec.model_copy(update={"lora": order.spec.lora.model_copy(update={"start_from": digest})})


async def _follow(backend: Backend, job: dict[str, Any], iterations: int, display: _Display) -> dict[str, Any]:
    from comfy.model_management import InterruptProcessingException

    try:
        async for news in backend.follow(job["id"], wait=5.0):
            job = news["job"]
            await display.show(backend, news)
            if iterations in job["loras"] and job["iterations"] > iterations:
                return job  # it was told to go further meanwhile
    except (asyncio.CancelledError, InterruptProcessingException):
        await _pause(backend, job["id"])
        raise
    if job["state"] == "failed":
        raise JobFailed(_last_words(job))
    if job["state"] != "done":
        raise TrainingStopped(
            f"job {job['id']} is {job['state']} at iteration {job['iteration']} of {job['iterations']}; queue this graph again "
            "to continue it, or turn wait off to go on with its newest LoRA"
        )
    return job


def _last_words(job: dict[str, Any]) -> str:
    """Why a job failed, and what its worker said before, which is often what led to it."""
    said = [line for line in (job["last_words"] or "").splitlines() if line not in (job["error"] or "")]
    return "\n".join([job["error"] or "the worker failed", *(["its last words:", *said[-8:]] if said else [])])


async def _pause(backend: Backend, job_id: str) -> None:
    try:
        await asyncio.wait_for(backend.pause(job_id), _PAUSE_SECONDS)
    except (BackendError, BackendUnreachable, TimeoutError) as error:
        logging.warning("MixGRPO: job %s could not be asked to pause (%s); `mixgrpo jobs pause` does", job_id, error)


def _unload_models() -> None:
    import comfy.model_management

    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


class _Display:
    """ComfyUI's progress bar with the newest pictures, and messages for the node's own panel."""

    def __init__(self, order: Order):
        import comfy.utils
        from comfy_execution.utils import get_executing_context

        context = get_executing_context()
        self.iteration = 0
        self._node = None if context is None else context.node_id
        self._backend, self._total = order.backend, order.spec.iterations
        self._weights = {reward.scorer: reward.weight for reward in order.spec.rewards}
        self._bar = comfy.utils.ProgressBar(self._total)
        self._seconds_left: float | None = None
        self._reward: float | None = None
        self._reached: list[list[float | None]] = []
        self._state, self._shown, self._sheet_at, self._told_at = "", 0, 0.0, 0.0

    async def show(self, backend: Backend, news: dict[str, Any]) -> None:
        """Take in what :meth:`Backend.follow` yields; raises ComfyUI's interrupt when the user has asked for it."""
        for event in news["events"]:
            if event["event"] == "iteration":
                self._take(event)
        sheet = await self._new_sheet(backend, news["job"]["id"])
        self._bar.update_absolute(min(self.iteration, self._total), self._total, sheet and ("JPEG", sheet, 512))
        now = time.monotonic()
        if news["job"]["state"] != self._state or now - self._told_at > _MESSAGE_SECONDS:
            self._state, self._told_at = news["job"]["state"], now
            self._tell(news["job"])

    def _take(self, event: dict[str, Any]) -> None:
        means = {name: score["mean"] for name, score in event["scores"].items()}
        self.iteration, self._seconds_left = event["iteration"], event["seconds_left"]
        self._reward = mixed_reward(means, self._weights)
        self._reached.append([self.iteration, self._reward])

    async def _new_sheet(self, backend: Backend, job_id: str) -> Image.Image | None:
        now = time.monotonic()
        if self.iteration <= self._shown or now - self._sheet_at < _SHEET_SECONDS:
            return None
        found = await newest_sheet(backend, job_id)
        if found is None or found[0] <= self._shown:
            return None
        self._shown, self._sheet_at = found[0], now
        return found[1]

    def _tell(self, job: dict[str, Any]) -> None:
        from server import PromptServer

        message = {
            "node": self._node,
            "backend": self._backend,
            "job": job["id"],
            "state": job["state"],
            "iteration": max(self.iteration, job["iteration"]),
            "iterations": job["iterations"],
            "reward": self._reward,
            "seconds_left": self._seconds_left,
            "reached": self._reached,
        }
        self._reached = []
        PromptServer.instance.send_sync("mixgrpo.progress", message, PromptServer.instance.client_id)
