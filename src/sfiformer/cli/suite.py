"""`sfi suite list|run|report`: many runs in one command, and the tables and figures that come of them."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from sfiformer.cli.options import Debug, given, with_settings
from sfiformer.errors import UserError

commands = typer.Typer(
    help="The paper's experiments, or your own: many runs in one command, and a report.", no_args_is_help=True
)

Name = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="A suite that `sfi suite list` shows, or a YAML file.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The suite's folder; runs/suites/NAME if not given."),
]

RUN_HELP = """Train all runs of a suite, several at a time; what is finished already is skipped.

Stop it with Ctrl-C, or lose it to a crash: the same command goes on where it was. A run that fails is \
recorded with its reason while the others go on; the exit code tells.

The settings below are for all runs, on top of what the suite says."""


@commands.command("list")
def list_suites(debug: Debug = False) -> None:
    """The suites that come with the package."""
    from sfiformer.suites import read_suite, suite_names
    from sfiformer.suites.plan import places

    for name in suite_names():
        suite = read_suite(name)
        print(f"{name:16} {len(places(suite)):4} runs  {suite.title}")


def run(
    name: Name,
    *,
    out: Out = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", metavar="N", min=1, help="Runs at a time; one on each GPU, or core, if not given."
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "slurm"],
        typer.Option(
            "--engine", metavar="local|slurm", help="On this machine, or each run a job of a cluster."
        ),
    ] = "local",
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm",
            metavar="KEY=VALUE",
            help="A parameter of the jobs, as submitit names it (timeout_min, mem_gb, slurm_partition, …); "
            "repeatable.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Only the runs DATASET/MODEL/seed-N whose name holds this, or fits it with * and ?; repeatable.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command of each run; train nothing.")
    ] = False,
    debug: Debug = False,
    **settings: str | None,
) -> None:
    from sfiformer.suites import read_suite
    from sfiformer.suites.plan import default_out, plan, select

    if slurm and engine != "slurm":
        raise UserError(f"--slurm {slurm[0]} is for jobs of a cluster: add --engine slurm")
    suite, overrides, parameters = read_suite(name), given(settings), _parameters(slurm or [])
    if dry_run:
        for planned in select(plan(suite, overrides), only or ()).values():
            print(shlex.join(["sfi", *planned.arguments(out or default_out(suite))]))
        return
    from sfiformer.suites import run_suite

    code = run_suite(
        suite,
        out,
        jobs=jobs,
        engine=engine,
        only=only or (),
        overrides=overrides,
        slurm=parameters,
    )
    raise SystemExit(code)


def report(name: Name, out: Out = None, debug: Debug = False) -> None:
    """Write the tables (Markdown, CSV, LaTeX) and figures (PNG, SVG) of a suite's runs into DIR/report.

    What DIR/report held before is replaced.
    """
    from sfiformer.suites import read_suite, report_suite

    written = report_suite(read_suite(name), out)
    print(written.text)
    for path in written.files:
        print(path)


def register(app: typer.Typer) -> None:
    commands.command(help=RUN_HELP)(with_settings(run, without=("seed",)))
    commands.command()(report)
    app.add_typer(commands, name="suite")


def _parameters(texts: list[str]) -> dict[str, Any]:
    parameters = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--slurm {text}: write KEY=VALUE, for instance --slurm timeout_min=600")
        parameters[key] = yaml.safe_load(value)
    return parameters
