"""Count the habits that make code and docs hard to read for someone who does not know the project.

    python tests/language_check.py FOLDER_OR_FILE ... [--files 10] [--list RULE] [--limit RULE=NUMBER ...]

Prints the count of every rule and the worst files. `--list` prints the places that break one rule. With `--limit`,
exits 1 if a count is above its limit, so that a test can hold the numbers down.

Rules:
    no-verb: the docstring of a function does not begin with a verb (`Return`, `Write`; not `Whether`, not `Take`), or
        the docstring of a module, class or property begins with a pronoun or preposition (`What`, `Of`)
    no-args: a public function with three or more parameters has no `Args:` section in its docstring; parameters that
        are `Annotated` do not count, as their annotation documents them
    fragment: half a sentence explains an argument or an attribute (`images: that share passes`, `# of the cache`)
    pronoun: `own`, `those`, `ones`, `what`, or `one` or `such` in place of a noun, in a docstring or comment
    synonym: a word from `SYNONYM`, which the glossary replaces, in a docstring, comment or Markdown
    vague-name: a function, class, parameter or variable has a name from `VAGUE_NAMES`
    paired: one statement assigns two values to two names (`a, b = x, y`)
    long-sentence: a sentence in a docstring or Markdown has more than 30 words
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_WORDS = 30
VAGUE_NAMES = "answer ask found given goal here kept know left most one other own said say take there what"
NO_NOUN = "as by for from how in of on one that these this those to what when where which who whose with"
VERBS = (
    "add align allocate append apply begin bind blend build calculate call cancel cast check choose clean clear close "
    "collect commit compare compute configure construct consume convert copy count create decode delete dequantize "
    "describe divide download draft draw drop emit enable encode end ensure estimate evaluate export extend extract "
    "fetch fill filter find fit forget format free generate get guess handle implement import initialize insert join "
    "keep leave limit list load look make map match measure merge mix move multiply normalize open pack pad parse "
    "permute plan predict prepare print process prune quantize queue raise read record regenerate reject remove "
    "rename render replace report reset reshape resolve respond retrieve return rotate round run sample save scale "
    "select send serve set show sort split stack start stop store submit summarize tile tokenize train trim truncate "
    "try unpack update upload use validate verify wait walk wrap write yield"
)
PRONOUN = re.compile(r"\b(?:own|those|ones|what|one(?=[,.;:)]| (?:that|which|is|was|with)\b)|such(?! as\b))\b", re.I)
FRAGMENT = re.compile(r"^(?:\s*`?\w+`?:|#) *(?:of|that|which|whose|as|by|where|when|what|those|from|in|with) ", re.M)
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SYNONYM = re.compile(r"\b(?:pictures?|anew|goal|refusals?|rivals?|ladders?|slabs?|sides|told)\b", re.IGNORECASE)


class Finding(NamedTuple):
    """A place that breaks a rule."""

    rule: str
    file: Path
    line: int
    text: str


def check_python(source: str, file: Path) -> Iterator[Finding]:
    """Yield the findings in one Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Definition):
            yield from check_definition(node, file)
        elif isinstance(node, ast.Assign) and {type(node.value), type(node.targets[0])} == {ast.Tuple}:
            yield Finding("paired", file, node.lineno, ast.unparse(node))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES.split():
            yield Finding("vague-name", file, node.lineno, node.id)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from check_text(token.string, file, token.start[0])


def check_definition(node: Definition, file: Path) -> Iterator[Finding]:
    """Yield the findings in the name, parameters and docstring of a module, class or function."""
    name: str = getattr(node, "name", file.stem)
    line: int = getattr(node, "lineno", 1)
    parameters: list[str] = []
    annotated = 0
    needs_verb = False
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parameters = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
        annotated = sum(ast.unparse(item.annotation).startswith("Annotated") for item in arguments if item.annotation)
        needs_verb = not {"property", "cached_property"} & {ast.unparse(item) for item in node.decorator_list}
    for word in [name, *parameters]:
        if word.strip("_") in VAGUE_NAMES.split():
            yield Finding("vague-name", file, line, word)
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    word = docstring.split()[0].strip("`*.,:").lower()
    stems = {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
    if word in NO_NOUN.split() or (needs_verb and not stems & {*VERBS.split()}):
        yield Finding("no-verb", file, line, docstring.splitlines()[0])
    if len(parameters) - annotated >= 3 and not name.startswith("_") and "Args:" not in docstring:
        yield Finding("no-args", file, line, f"{name}({', '.join(parameters)})")
    yield from check_text(docstring, file, line)


def check_text(text: str, file: Path, first_line: int = 1) -> Iterator[Finding]:
    """Yield the findings in a docstring, a comment or a whole Markdown file.

    Args:
        text: the text to check.
        file: the file to name in findings. Pronouns and fragments are allowed in Markdown.
        first_line: the line of the file on which the text starts.
    """
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]+`", "`x`", text)
    code_rules = {"pronoun": PRONOUN, "fragment": FRAGMENT} if file.suffix == ".py" else {}
    for rule, pattern in {"synonym": SYNONYM, **code_rules}.items():
        for match in pattern.finditer(text):
            line = first_line + text.count("\n", 0, match.start())
            yield Finding(rule, file, line, " ".join(text[max(0, match.start() - 30) : match.end() + 30].split()))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.|`?[\w-]+`?: ))", text):
        if "|" not in paragraph and not paragraph.startswith("    "):  # neither a table nor code
            line = first_line + text.count("\n", 0, text.find(paragraph))
            for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
                if len(sentence.split()) > MAX_WORDS:
                    yield Finding("long-sentence", file, line, " ".join(sentence.split()))


def main() -> str:
    """Check the files named on the command line; return the limits that are exceeded, a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="folders or files, Python and Markdown")
    parser.add_argument("--files", type=int, default=10, help="number of worst files to print")
    parser.add_argument("--list", metavar="RULE", help="print the places that break this rule")
    parser.add_argument("--limit", action="append", default=[], metavar="RULE=NUMBER", help="largest count allowed")
    options = parser.parse_args()
    for path in options.paths:
        if not path.exists():
            parser.error(f"{path} does not exist")
    files = [file for path in options.paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    findings: list[Finding] = []
    for file in files:
        if file.suffix in (".py", ".md"):
            check = check_python if file.suffix == ".py" else check_text
            findings += check(file.read_text(encoding="utf-8"), file)
    counts = dict.fromkeys(re.findall(r"^    ([\w-]+):", str(__doc__), re.MULTILINE), 0)  # the rules listed above
    for finding in findings:
        counts[finding.rule] += 1
        if finding.rule == options.list:
            print(f"{finding.file}:{finding.line}: {finding.text}")
    worst_files = Counter(finding.file for finding in findings).most_common(options.files)
    print(*(f"{count:6} {label}" for label, count in [*counts.items(), *worst_files]), sep="\n")
    limits = [limit.split("=") for limit in options.limit]
    return "\n".join(f"{rule}: {counts[rule]}, limit {limit}" for rule, limit in limits if counts[rule] > int(limit))


if __name__ == "__main__":
    sys.exit(main() or None)
