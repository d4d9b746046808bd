"""The commands and their options; what they do lies in the modules beside this one, imported when they are called."""

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from prunus.cli import speech

app = typer.Typer(
    name="prunus",
    help="Train a neural network to a budget, and get back a plain, smaller, provably equal one.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 110},
)
data_app = typer.Typer(help="Fetch data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Model = Annotated[str | None, typer.Option(metavar="NAME", help="mlp, lenet5, or your own pkg.mod:factory")]
Data = Annotated[
    str | None, typer.Option(metavar="NAME", help="digits, mnist, fashion-mnist, or your own pkg.mod:loaders")
]
Input = Annotated[
    str | None, typer.Option("--input", metavar="SHAPE", help="shape of example inputs, the batch first: 2x3x32x32")
]
Units = Annotated[
    str | None,
    typer.Option(
        metavar="KINDS",
        help="what gets gates: structured (the default), groups, or some of maps, neurons, features, heads, "
        "inputs, head_dims, width and branches, with commas; or weights, 16x16, 2:4",
    ),
]
Form = Annotated[
    str | None, typer.Option(metavar="FORM", help="of the shrunk model: eager, graph or auto (the default)")
]
Only = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="gate these groups or modules alone; several times")
]
Freeze = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="leave these groups or modules alone; several times")
]
Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 and so on; the fastest there is by default")
]
Number: TypeAlias = float | None
Whole: TypeAlias = int | None
Word: TypeAlias = str | None
Switch: TypeAlias = bool | None


class _WithDefaults(TyperCommand):
    """A command whose help names the settings' defaults, which are looked up only when somebody asks."""

    def get_help(self, ctx: Any) -> str:
        """The help text."""
        from prunus.train.settings import Settings

        defaults = Settings().as_dict()
        for parameter in self.params:
            value = defaults.get(parameter.name or "")
            if value is not None:
                parameter.help = f"{parameter.help} [{_shown(value)}]"  # type: ignore[attr-defined]
        return super().get_help(ctx)


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value}"


def _setting(help_: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help_, metavar=metavar)


@app.command(cls=_WithDefaults, short_help="Train a model to a budget, or run the embedded demo.")
def train(
    context: typer.Context,
    model: Model = None,
    data: Data = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="LIMIT", help="params=10%, macs=30%, bytes=4MB, layer:NAME=50%; several times if need be"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where to write; runs/<model>-<data> by default")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in the output folder")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the run in the output folder")] = False,
    epochs: Annotated[Whole, _setting("all epochs, the polish included", "N")] = None,
    batch_size: Annotated[Whole, _setting("examples a step", "N")] = None,
    seed: Annotated[Whole, _setting("of weights, gates, order and noise", "N")] = None,
    device: Device = None,
    precision: Annotated[Word, _setting("no (float32) or bf16", "KIND")] = None,
    baseline: Annotated[
        bool | None,
        typer.Option("--baseline/--no-baseline", help="train the dense model too, to compare with; on for digits"),
    ] = None,
    input_: Input = None,
    units: Units = None,
    only: Only = None,
    freeze: Freeze = None,
    form: Form = None,
    method: Annotated[Word, _setting("how the budget is reached", "NAME")] = None,
    weight_lr: Annotated[Number, _setting("Adam's rate of the weights", "N")] = None,
    gate_lr: Annotated[Number, _setting("Adam's rate of the gates; by the steps if left out", "N")] = None,
    weight_schedule: Annotated[Word, _setting("cosine or constant", "KIND")] = None,
    gate_schedule: Annotated[Word, _setting("cosine or constant", "KIND")] = None,
    weight_decay: Annotated[Number, _setting("coefficient of the expected L2 norm under the gates", "N")] = None,
    dual_rate: Annotated[Number, _setting("step size of the multipliers; by the steps if left out", "N")] = None,
    dual: Annotated[Word, _setting("the cost that the multipliers watch: deployed or expected", "COST")] = None,
    restarts: Annotated[Switch, _setting("set a multiplier to zero when its budget is met")] = None,
    extrapolate: Annotated[Switch, _setting("extrapolate from the past")] = None,
    warm_up: Annotated[Number, _setting("share of the constrained epochs over which the limits fall", "N")] = None,
    keep: Annotated[Number, _setting("initial keep probability of the gates", "N")] = None,
    per_example: Annotated[Switch, _setting("one sample of the gates an example")] = None,
    round_to: Annotated[Whole, _setting("the shrunk model's widths are multiples of this", "N")] = None,
    ema: Annotated[Number, _setting("decay of the parameters' average; 0 for none", "N")] = None,
    polish: Annotated[Number, _setting("share of the epochs that trains on with the gates fixed", "N")] = None,
    polish_noise: Annotated[Switch, _setting("keep the open gates' noise while polishing")] = None,
    accumulate: Annotated[Whole, _setting("mini-batches a step", "N")] = None,
    log_every: Annotated[Whole, _setting("steps between two lines of the log", "N")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="say nothing but what went wrong")] = False,
) -> None:
    """Train a model to a budget; without a model, data and budget, run the embedded demo.

    Writes receipt.json, small.safetensors, report.html, plots/, log.jsonl and checkpoint/ into the output folder.
    """
    from prunus.cli.train import train as work

    names = {
        "model": model, "data": data, "budgets": tuple(budget or ()), "units": units, "only": tuple(only or ()),
        "freeze": tuple(freeze or ()), "form": form, "inputs": input_, "baseline": baseline,
    }  # fmt: skip
    given = {name: value for name, value in names.items() if value is not None and value != ()}
    settings = {name: context.params[name] for name in SETTINGS if context.params[name] is not None}
    work(given, settings, out=out, device=device, resume=resume, overwrite=overwrite, quiet=quiet)


SETTINGS = (
    "epochs", "batch_size", "seed", "precision", "method", "weight_lr", "gate_lr", "weight_schedule", "gate_schedule",
    "weight_decay", "dual_rate", "dual", "restarts", "extrapolate", "warm_up", "keep", "per_example", "round_to", "ema",
    "polish", "polish_noise", "accumulate", "log_every",
)  # fmt: skip


@app.command(short_help="Show what can shrink, and what cannot and why.")
def inspect(
    model: Annotated[str, typer.Option(metavar="NAME", help="mlp, lenet5, or your own pkg.mod:factory")],
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="show why this group shrinks together, or is frozen")
    ] = None,
    data: Data = None,
    input_: Input = None,
    units: Units = None,
    only: Only = None,
    freeze: Freeze = None,
    form: Form = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON and nothing else")] = False,
) -> None:
    """Show what can shrink in a model, what that would save, and what is frozen and why."""
    from prunus.cli.inspect import Asked
    from prunus.cli.inspect import inspect as work

    work(
        Asked(
            model, group, data, input_, units or "structured", tuple(only or ()), tuple(freeze or ()), form or "auto",
            as_json,
        )
    )  # fmt: skip


@app.command(short_help="Shrink a run's last checkpoint.")
def shrink(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")],
    model: Model = None,
    data: Data = None,
    device: Device = None,
) -> None:
    """Shrink a run's last checkpoint, finished or not: write its receipt and small.safetensors."""
    from prunus.cli.shrink import shrink as work

    given = {"model": model, "data": data}
    work(run, {name: value for name, value in given.items() if value is not None}, device)


@app.command(short_help="Write the report of one run or several.")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="RUN/report.html by default; report.html for several runs")
    ] = None,
) -> None:
    """Write the report of a run, or of several side by side."""
    from prunus.report import write

    page = write(runs, out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html")))
    speech.out().print(str(page), soft_wrap=True, markup=False)


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="mnist or fashion-mnist")]) -> None:
    """Fetch a data set, check it, and print the folder that holds it."""
    if name == "digits":
        speech.note("digits comes with scikit-learn: there is nothing to fetch.")
        return
    from prunus.data import get

    speech.out().print(str(get(name)), soft_wrap=True, markup=False)


@app.command(short_help="Measure what gates cost and shrinking saves.")
def bench(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="mlp, lenet5 (both by default) or your own pkg.mod:factory"),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="examples a step")] = 128,
    blocks: Annotated[int, typer.Option(metavar="N", min=2, help="blocks of steps, dense and gated taking turns")] = 20,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="steps a block")] = 20,
    input_: Input = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON and nothing else")] = False,
) -> None:
    """Measure what gates cost in training and what shrinking saves, side by side in one run."""
    from prunus.cli.bench import bench as work

    work(model or ["mlp", "lenet5"], batch, blocks, steps, input_, device, as_json)


def _version(asked: bool) -> None:
    if asked:
        speech.out().print(f"prunus {metadata.version('prunus')}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends by `SystemExit`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter is no reason to stop
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a user's pkg.mod:factory lies
    command = typer.main.get_command(app)
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(speech.guarded(lambda: command.main(args=words, prog_name="prunus", standalone_mode=False)))
