"""Count the structure of the package and compare it with the bounds of ``structure.toml``.

The exit code is 1 where a figure differs from its bound. ``--tighten`` lowers the bounds to the figures; ``--table``
prints the figures with what counts, and the lines of code of the other folders.
"""

from __future__ import annotations

import ast
import gc
import graphlib
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomli

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = ROOT / "tests" / "structure.toml"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 455, 80
MEDIAN_FILE_LINES = range(150, 301)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_IMPORT_BY_NAME = re.compile(r"hpcbench(\.\w+)+(:\w+)?")
"""A string that names a module, or a member of one: an import that only runs when it is asked for."""


class Module(NamedTuple):
    """One file that is not empty."""

    path: Path
    text: str
    tree: list[ast.AST]
    """All nodes of its syntax tree, breadth first."""

    def code_lines(self) -> int:
        """Lines with a token, without docstrings and comments."""
        documentation, code = set[int](), set[int]()
        for node in self.nodes(ast.Expr):
            if isinstance(getattr(node.value, "value", None), str):
                documentation.update(range(node.lineno, node.end_lineno + 1))
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _LAYOUT:
                code.update(range(token.start[0], token.end[0] + 1))
        return len(code - documentation)

    def nodes(self, *kinds: type[ast.AST]) -> list[Any]:
        return [node for node in self.tree if isinstance(node, kinds)]

    def deferred_imports(self) -> list[int]:
        """Lines of the imports inside functions."""
        spans = [range(function.lineno, function.end_lineno + 1) for function in self.nodes(*FUNCTIONS)]
        lines = {node.lineno for node in self.nodes(ast.Import, ast.ImportFrom)}
        return sorted(line for line in lines if any(line in span for span in spans))

    def imported(self) -> Iterator[str]:
        """Names of modules and members, also those that a string names or that only type checkers import."""
        for node in self.tree:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and _IMPORT_BY_NAME.fullmatch(str(node.value)):
                yield str(node.value).replace(":", ".")


def read_modules(folder: str) -> list[Module]:
    """All modules below ``folder`` of the checkout that are not empty."""
    files = ((path, path.read_text(encoding="utf-8")) for path in sorted((ROOT / folder).rglob("*.py")))
    return [Module(path.relative_to(ROOT), text, [*ast.walk(ast.parse(text))]) for path, text in files if text.strip()]


def import_cycle(modules: list[Module]) -> list[str]:
    """The modules of one cycle of imports; none where there is no cycle. The package itself only offers names."""
    named = {".".join(one.path.with_suffix("").parts).removesuffix(".__init__"): one for one in modules}
    del named["hpcbench"]
    graph = dict[str, set[str]]()
    for name, module in named.items():
        needed = {target if target in named else target.rpartition(".")[0] for target in module.imported()}
        graph[name] = needed & named.keys() - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def measure(modules: list[Module]) -> dict[str, tuple[int, list[str]]]:
    """Each figure with the places that count."""
    lines = sorted(((module.code_lines(), str(module.path)) for module in modules), reverse=True)
    places = {
        "files": [f"{count:5} {path}" for count, path in lines if count],
        "classes": [f"{node.name} in {module.path}" for module in modules for node in module.nodes(ast.ClassDef)],
        "import_cycle": import_cycle(modules),
        "deferred_imports": [f"{module.path}:{line}" for module in modules for line in module.deferred_imports()],
        # All that the parameter ``plan`` of ``submit`` can pass.
        "plan_parameter_files": [str(module.path) for module in modules if re.search(r"\w: SweepPlan\b", module.text)],
    }
    figures = {name: (len(found), found) for name, found in places.items()}
    return {"code_lines": (sum(count for count, _ in lines), []), **figures}


def too_long(modules: list[Module]) -> Iterator[str]:
    """Yield files and functions that are too long."""
    for module in modules:
        if (lines := module.text.count("\n")) > MAX_FILE_LINES:
            yield f"{module.path}: {lines} lines, at most {MAX_FILE_LINES}"
        for node in module.nodes(*FUNCTIONS):
            if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                yield f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def main() -> int:
    """Print the figures, or those that differ from their bounds."""
    gc.disable()  # It would walk half a million nodes again and again: a third of the time.
    package, others = read_modules("hpcbench"), [*read_modules("tests"), *read_modules("benchmarks")]
    measured, text = measure(package), BOUNDS.read_text(encoding="utf-8")
    if "--table" in sys.argv:
        for name, (figure, places) in measured.items():
            print(f"{name}: {figure}", *places, sep="\n    ")
        for folder in ("tests", "benchmarks"):
            lines = sum(module.code_lines() for module in others if module.path.parts[0] == folder)
            print(f"code_lines of {folder}: {lines}")
        return 0
    if "--tighten" in sys.argv:
        lowered = {name: min(bound, measured[name][0]) for name, bound in tomli.loads(text).items()}
        text = re.sub(r"^(\w+) = \d+$", lambda line: f"{line[1]} = {lowered[line[1]]}", text, flags=re.M)
        BOUNDS.write_text(text, encoding="utf-8")
    messages = list(too_long([*package, *others]))
    median = statistics.median(one.text.count("\n") for one in package if one.path.name != "__init__.py")
    if round(median) not in MEDIAN_FILE_LINES:
        messages.append(f"the median file has {median:g} lines, {MEDIAN_FILE_LINES} are right")
    for name, bound in tomli.loads(text).items():
        figure, places = measured[name]
        if figure > bound:
            messages += [f"{name}: {figure}, at most {bound}", *(f"    {place}" for place in places[:20])]
        elif figure < bound:
            messages.append(f"{name}: {figure}; lower its bound of {bound} (--tighten)")
    print(*messages, sep="\n", end="\n" if messages else "")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
