"""The commands of `lantern-rt` and their help. A command's module is imported only when the command is used."""

from __future__ import annotations

import importlib
import re
import textwrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import LanternError, RequestError
from ..hints import suggest_name

PROGRAM = "lantern-rt"
# Commands by name: the module and function name of each command, and its line in the list of commands. A module that
# has a dict `STEPS` has subcommands; `STEPS` maps the names of their functions to usage examples.
COMMANDS = {
    "run": ("run", "Generate images from prompts, class ids or text embeddings."),
    "edit": ("edit", "Regenerate a part of an image."),
    "serve": ("serve", "Serve bundles over HTTP: OpenAI's Images API, a web page, metrics."),
    "inspect": ("inspect", "Check the files of a bundle or an engine folder, and describe it."),
    "doctor": ("doctor", "Print versions, backends and hardware of this host, and problems."),
    "models": ("models", "List published models, which `run`, `serve` and `export` take by name."),
    "export": ("export", "Convert a checkpoint to a bundle, and compare every graph with the checkpoint."),
    "train-drafter": ("train_drafter", "Train an EAGLE drafter or draft heads for a bundle's target."),
    "build-engine": ("build_engine", "Build TensorRT engines from a bundle, for `run --engines`."),
    "bench": ("bench", "Compare the speed of decoding methods with that of plain decoding."),
    "eval": ("evaluate", "Compare the images of decoding methods with those of plain decoding."),
    "push": ("push", "Upload a bundle to the Hugging Face Hub, with a model card."),
    "verify": ("verify", "Compare a bundle's graphs with the checkpoints they were exported from."),
}
_REMEDIES = {"seed": "without it, a random seed is chosen and printed", "size": "--scale 2 enlarges the image twice"}


class _CliCommand(TyperCommand):
    """Command with plain help (typer's panels would import every command), whose errors name options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            from pydantic import ValidationError  # typer parses values with pydantic

            from ..inputs import describe_validation_error

            if not isinstance(error.__cause__, ValidationError) or error.param is None:
                raise
            fields = {**describe_validation_error(error.__cause__), "field": error.param.opts[-1]}
            remedy = _REMEDIES.get(error.param.name or "", f"see `{ctx.command_path} --help`")
            raise RequestError(**fields, remedy=remedy) from error
        except typer.exceptions.TyperException as error:
            if not hasattr(error, "possibilities"):  # only the error of an unknown option has it
                raise
            name = getattr(error, "option_name", "")
            options = [option for param in self.params for option in param.opts]
            raise _make_unknown_name_error("option", name, options, ctx.command_path) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LanternError as error:
            from ..subjects.table import PARAMETER_NAMES

            values = [item for value in ctx.params.values() for item in (value if isinstance(value, list) else [value])]
            if error.field in map(str, values):  # a file, which may have the name of an option
                raise
            flags = [param.opts[-1] for param in self.params if param.param_type_name == "option"]
            options = {flag.removeprefix("--").replace("-", "_"): flag for flag in flags}
            options.pop("prompt", None)  # prompts are usually arguments
            parameter = error.field.replace("-", "_").replace(" ", "_")
            name, _ = PARAMETER_NAMES.get(parameter, (error.field, ""))
            error.field = options.get(parameter) or options.get(name, name)
            error.remedy = error.remedy or _REMEDIES.get(parameter, "")
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for title in sorted(sections, key=["Options"].count):  # general options are last
            with formatter.section(title):
                formatter.write_dl(sections[title])


class _CliGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            raise _make_unknown_name_error("command", cmd_name, [*COMMANDS], ctx.command_path)
        name, _ = COMMANDS[cmd_name]
        module = importlib.import_module(f".{name}", __package__)
        command = typer.Typer(add_completion=False, rich_markup_mode=None)
        steps: dict[str, str] = getattr(module, "STEPS", {})
        for step, examples in (steps or {name: module.EXAMPLES}).items():
            function = getattr(module, step)
            summary = (function.__doc__ or "").partition("\n")[0]  # typer would cut it at one line
            command.command(step, cls=_CliCommand, short_help=summary, epilog=_format_examples(examples))(function)
        if steps:
            examples = "\n".join(text.strip() for text in steps.values())
            command.callback(help=module.__doc__, epilog=_format_examples(examples))(lambda: None)
        return typer.main.get_command(command)


def _make_unknown_name_error(kind: str, name: str, known_names: list[str], command_path: str) -> RequestError:
    remedy = suggest_name(name, known_names) or f"see `{command_path} --help`"
    return RequestError(f"no such {kind}", field=name, remedy=remedy)


def _format_examples(commands: str) -> str:
    """Wrap command lines at 80 columns, but not in quotes or between an option and its value."""
    lines = ["\b\nExamples:"]
    for command in commands.strip().splitlines():
        unbreakable = re.sub(r"""(["']).*?\1|--\S+ (?=[^-\\])""", lambda match: match[0].replace(" ", "\0"), command)
        parts = textwrap.wrap(unbreakable, 74, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        lines += " \\\n".join(parts).replace("\0", " ").splitlines()
    return "\n  ".join(lines)


app = typer.Typer(
    name=PROGRAM,
    cls=_CliGroup,
    help="Make images from text, fast.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=_format_examples('lantern-rt run "a red sphere on sand"\nlantern-rt inspect scenes\nlantern-rt doctor'),
)


def _print_version(requested: bool) -> None:
    if requested:
        from .. import __version__
        from .console import print_text

        print_text(f"lantern-rt {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _handle_program_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    from .console import print_text, print_warnings

    context.with_resource(print_warnings())
    if context.invoked_subcommand is None:
        print_text(context.get_help())
