"""The commands of `lantern-rt` and their options. A command's module is imported when the command is used."""

from __future__ import annotations

import importlib
import re
import textwrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import LanternError, RequestError

PROGRAM = "lantern-rt"
# Every command: the function that has its options, in a module of that name, and what the list of commands says. A
# module with `STEPS` has several functions instead, each a command below it, with its examples.
COMMANDS = {
    "run": ("run", "Turn prompts (or class ids, or embeddings of texts) into PNG files."),
    "edit": ("edit", "Draw a part of a picture anew."),
    "serve": ("serve", "Serve bundles over HTTP: OpenAI's Images API, a web page, metrics."),
    "inspect": ("inspect", "Check a bundle or an engine folder, hashes included, and print what it says about itself."),
    "doctor": ("doctor", "Print versions, backends, cores, memory, GPUs, what will be used, and what is wrong."),
    "export": ("export", "Turn a checkpoint into a bundle, and check every graph against it."),
    "train-drafter": ("train_drafter", "Train an EAGLE drafter for a bundle's target, or heads for its windows."),
    "build-engine": ("build_engine", "Turn a bundle into plans for a GPU; `run --engines` runs them."),
    "bench": ("bench", "Compare the speed of methods with ar's, in turns on the same prompts and seeds."),
    "eval": ("evaluate", "Compare the images of methods with plain decoding's."),
    "push": ("push", "Send a bundle to the hub, with a model card."),
    "verify": ("verify", "Compare a bundle's graphs with what they were made from."),
}


# Options, where what a pipeline calls a parameter has another name.
_OPTIONS = {"prompts": "prompt", "class_ids": "class_id", "num_images": "count", "together": "batch"}


_CURES = {"seed": "`--seed $RANDOM` draws another image each time", "size": "--scale 2 enlarges the image twice"}


class _Command(TyperCommand):
    """A command whose help has a section for every group of options, and whose refusals name options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            from pydantic import ValidationError  # by which typer reads values

            from ..inputs import explain

            if not isinstance(error.__cause__, ValidationError) or error.param is None:
                raise
            fields = {**explain(error.__cause__), "field": error.param.opts[-1]}
            cure = _CURES.get(error.param.name or "", f"see `{ctx.command_path} --help`")
            raise RequestError(**fields, remedy=cure) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LanternError as error:
            values = [one for own in ctx.params.values() for one in (own if isinstance(own, list) else [own])]
            if error.field in map(str, values):  # a file, perhaps named like an option
                raise
            names = {one.name: one.opts[-1] for one in self.params if one.param_type_name == "option"}
            names.pop("prompt", None)  # most give it without the option
            field = error.field.replace("-", "_").replace(" ", "_")
            alias = _OPTIONS.get(field, error.field)
            error.field = names.get(field) or names.get(alias, alias)
            error.remedy = error.remedy or _CURES.get(field, "")
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if line := parameter.get_help_record(ctx):
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(line)
        for name in sorted(sections, key=["Options"].count):  # what has no group comes last
            with formatter.section(name):
                formatter.write_dl(sections[name])


class _Steps(TyperGroup):
    """Commands below a command, listed with their first lines."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, (one.help or "").partition("\n")[0]) for name, one in self.commands.items()])


class _Commands(TyperGroup):
    """The commands, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        name = COMMANDS[cmd_name][0]
        module = importlib.import_module(f".{name}", __package__)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        steps: dict[str, str] = getattr(module, "STEPS", None) or {cmd_name: module.EXAMPLES}
        for step, examples in steps.items():
            function = getattr(module, name if step == cmd_name else step)
            app.command(step, cls=_Command, epilog=_examples(examples))(function)
        if cmd_name not in steps:
            examples = "\n".join(one.strip() for one in steps.values())
            app.callback(cls=_Steps, help=module.__doc__, epilog=_examples(examples))(_nothing)
        return typer.main.get_command(app)


def _nothing() -> None:
    """What a group of commands does by itself."""


def _examples(lines: str) -> str:
    """Commands within 80 columns, folded as a shell reads them."""
    folded = ["\b\nExamples:"]
    for line in lines.strip().splitlines():
        kept = re.sub(r"""(["']).*?\1|--\S+ (?=[^-\\])""", lambda quoted: quoted[0].replace(" ", "\0"), line)
        parts = textwrap.wrap(kept, 74, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        folded += " \\\n".join(parts).replace("\0", " ").splitlines()
    return "\n  ".join(folded)


app = typer.Typer(
    name=PROGRAM,
    cls=_Commands,
    help="Image generation with relaxed speculative decoding.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=_examples('lantern-rt run "a red sphere on sand"\nlantern-rt inspect scenes\nlantern-rt doctor'),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__
        from .console import print_text

        print_text(f"lantern-rt {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    from .console import print_text, print_warnings

    context.with_resource(print_warnings())
    if context.invoked_subcommand is None:
        print_text(context.get_help())
