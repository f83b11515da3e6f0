"""The command line: ``mixgrpo demo | train | plan | presets | sample | compare | serve | jobs | doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .console import console
from .doctor.command import doctor
from .errors import MixGRPOError
from .planner.command import plan
from .presets import presets, show_preset
from .server import commands


class _Refusals:
    """Show a refusal as its one sentence, without a traceback; set MIXGRPO_TRACEBACK=1 to see where it was raised."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MixGRPOError) and not os.environ.get("MIXGRPO_TRACEBACK"):
            console.print(f"[bold red]error[/] {type(error).__name__}: ", end="")
            console.print(str(error), markup=False, soft_wrap=True)
            raise typer.Exit(1)


class _Commands(TyperGroup):
    """All commands, every one with its refusals shown like that."""

    def invoke(self, context: typer.Context) -> Any:
        with _Refusals():
            return super().invoke(context)


app = typer.Typer(
    cls=_Commands,
    help="MixGRPO: align flow-matching image models with what you like.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(commands.serve)
app.command()(doctor)
app.command()(plan)
app.command()(presets)
app.add_typer(commands.jobs, name="jobs")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the run, the pictures and summary.json.")] = Path("runs/demo"),
    iterations: Annotated[int | None, typer.Option(min=1, help="How far to train (default: the tuned length).")] = None,
    pairs: Annotated[int, typer.Option(min=24, help="Held-out (caption, seed) pairs with two shapes.")] = 400,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train the bundled starter model for a few minutes and show what changed."""
    from .demo import run_demo

    with _Refusals():
        run_demo(out, iterations, pairs, seed)


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="Job file, YAML or JSON.")],
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/NAME).")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to train with, one per GPU.")] = 1,
    start_from: Annotated[
        Path | None, typer.Option(help="A LoRA that this project trained, to go on from; the base model otherwise.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Published settings to begin with; the job's own fields win.")] = None,
) -> None:
    """Train a job; run the same command again to continue a stopped run, or with more iterations to go further."""
    from .specs.job import parse_job, read_fields
    from .train.launch import run_job, starting_from

    with _Refusals():
        fields = read_fields(job)
        if preset is not None and isinstance(fields, dict):
            fields |= {"preset": preset}
        spec = parse_job(fields)
        if "preset" in fields:
            show_preset(fields["preset"], fields)
        if start_from is not None:
            spec = starting_from(spec, start_from)
        lora = run_job(spec, out or Path("runs") / spec.name, ranks, start_from)
        console.print(f"LoRA: {lora}", soft_wrap=True)


@app.command()
def sample(
    prompt: Annotated[list[str], typer.Option(help="What to draw; may be given several times.")],
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("sample.png"),
    lora: Annotated[Path | None, typer.Option(help="A LoRA that this project trained.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 4,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int, typer.Option(min=2)] = 10,
    shift: Annotated[float, typer.Option(min=0.01)] = 3.0,
    guidance: Annotated[float, typer.Option(min=0)] = 2.0,
) -> None:
    """Draw pictures with the starter model, with or without a LoRA; the same seeds give the same pictures."""
    from .demo import sample_sheet
    from .specs.job import parse_sampling

    with _Refusals():
        sampling = parse_sampling({"steps": steps, "shift": shift, "guidance": guidance, "window": {"size": 1}})
        sample_sheet(out, prompt, lora, count, seed, sampling)
        console.print(f"wrote {out}", soft_wrap=True)


@app.command()
def compare(
    job: Annotated[Path, typer.Argument(help="Comparison file, YAML or JSON.")],
    out: Annotated[Path, typer.Option(help="Folder for the table, the pictures and the chart.")] = Path("runs/compare"),
) -> None:
    """Put samplers side by side: the same prompts, seeds and noise for all of them; cost, pictures and rewards."""
    from .lab.run import run_comparison
    from .lab.spec import load_compare

    with _Refusals():
        run_comparison(load_compare(job), out)
        console.print(f"wrote {out}", soft_wrap=True)


if __name__ == "__main__":
    app()
