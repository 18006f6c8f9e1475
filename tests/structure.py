"""Count the structure of the package and compare it with the bounds of ``structure.toml``.

The exit code is 1 where a figure differs from its bound. ``--tighten`` lowers the bounds to the figures; ``--table``
prints all figures, also those without a bound.
"""

from __future__ import annotations

import ast
import graphlib
import io
import re
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import tomli

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = ROOT / "tests" / "structure.toml"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80
MEDIAN_FILE_LINES = range(150, 301)
NodeT = TypeVar("NodeT", bound=ast.AST)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_IMPORT_BY_NAME = re.compile(r"hpcbench(\.\w+)+(:\w+)?")
"""A string that names a module, or a member of one: an import that only runs when it is asked for."""
_FAMILY_FILES = "strategies"
"""Below this folder the files of a strategy family share their names on purpose."""


class Module(NamedTuple):
    """One file that is not empty."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    def code_lines(self) -> int:
        """Lines with a token, without docstrings and comments."""
        documentation, code = set[int](), set[int]()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _LAYOUT:
                code.update(range(token.start[0], token.end[0] + 1))
        return len(code - documentation)

    def nodes(self, kind: type[NodeT]) -> list[NodeT]:
        return [node for node in ast.walk(self.tree) if isinstance(node, kind)]

    def deferred_imports(self) -> list[int]:
        """Lines of the imports inside functions."""
        functions = [*self.nodes(ast.FunctionDef), *self.nodes(ast.AsyncFunctionDef)]
        inside = (node for function in functions for node in ast.walk(function))
        return sorted({node.lineno for node in inside if isinstance(node, ast.Import | ast.ImportFrom)})

    def imported(self) -> Iterator[str]:
        """Names of modules and members, also those that a string names; imports for type checkers are left out."""
        for_types = {
            id(inner)
            for node in self.nodes(ast.If)
            if ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import) and id(node) not in for_types:
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and id(node) not in for_types:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and _IMPORT_BY_NAME.fullmatch(str(node.value)):
                yield str(node.value).replace(":", ".")


def read_modules(folder: str) -> list[Module]:
    """All modules below ``folder`` of the checkout that are not empty."""
    files = ((path, path.read_text(encoding="utf-8")) for path in sorted((ROOT / folder).rglob("*.py")))
    return [Module(path.relative_to(ROOT), text, ast.parse(text)) for path, text in files if text.strip()]


def import_cycle(modules: list[Module]) -> list[str]:
    """The modules of one cycle of imports; none where there is no cycle. The package itself only offers names."""
    names = {module.name for module in modules} - {"hpcbench"}
    graph = defaultdict[str, set[str]](set)
    for module in modules:
        for target in module.imported():
            needed = target if target in names else target.rpartition(".")[0]
            if needed in names and needed != module.name:
                graph[module.name].add(needed)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def repeated(names: list[tuple[str, Path]]) -> list[str]:
    """Names that stand in several modules."""
    places = defaultdict[str, list[str]](list)
    for name, path in names:
        if _FAMILY_FILES not in path.parts[:-1]:
            places[name].append(str(path))
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def measure(modules: list[Module]) -> dict[str, tuple[int, list[str]]]:
    """Each figure with the places that count."""
    code_lines = {str(module.path): module.code_lines() for module in modules}
    longest = sorted(((count, path) for path, count in code_lines.items() if count), reverse=True)
    classes = [(node.name, module.path) for module in modules for node in module.nodes(ast.ClassDef)]
    named = [(module.path.name, module.path) for module in modules if not module.path.name.startswith("__")]
    places = {
        "files": [f"{count:5} {path}" for count, path in longest],
        "classes": [f"{name} in {path}" for name, path in classes],
        "repeated_names": repeated([*named, *((name, path) for name, path in classes if not name.startswith("_"))]),
        "import_cycle": import_cycle(modules),
        "deferred_imports": [f"{module.path}:{line}" for module in modules for line in module.deferred_imports()],
    }
    # All that the parameter ``plan`` of ``submit`` can pass.
    places["plan_parameter_files"] = [
        str(module.path)
        for module in modules
        if any(node.annotation and "SweepPlan" in ast.unparse(node.annotation) for node in module.nodes(ast.arg))
    ]
    longest_file = max(modules, key=lambda module: module.text.count("\n"))
    lines = {
        "code_lines": (sum(code_lines.values()), list[str]()),
        "longest_file_lines": (longest_file.text.count("\n"), [str(longest_file.path)]),
    }
    return lines | {name: (len(found), found) for name, found in places.items()}


def wrong_lengths(package: list[Module], others: list[Module]) -> Iterator[str]:
    """Yield files and functions that are too long, and the package's median file where it is out of its range."""
    median = statistics.median(module.text.count("\n") for module in package if module.path.name != "__init__.py")
    if round(median) not in MEDIAN_FILE_LINES:
        yield f"the median file has {median:g} lines, {MEDIAN_FILE_LINES} are right"
    for module in (*package, *others):
        if (lines := module.text.count("\n")) > MAX_FILE_LINES:
            yield f"{module.path}: {lines} lines, at most {MAX_FILE_LINES}"
        functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = module.nodes(ast.FunctionDef)
        for node in [*functions, *module.nodes(ast.AsyncFunctionDef)]:
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES:
                yield f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def main() -> int:
    """Print the figures, or those that differ from their bounds."""
    package, others = read_modules("hpcbench"), [*read_modules("tests"), *read_modules("benchmarks")]
    measured, text = measure(package), BOUNDS.read_text(encoding="utf-8")
    if "--table" in sys.argv:
        for name, (figure, places) in measured.items():
            print(f"{name}: {figure}", *places, sep="\n    ")
        for folder in ("tests", "benchmarks"):
            print(
                f"code_lines of {folder}: {sum(module.code_lines() for module in others if module.path.parts[0] == folder)}"
            )
        return 0
    if "--tighten" in sys.argv:
        lowered = {name: min(bound, measured[name][0]) for name, bound in tomli.loads(text).items()}
        text = re.sub(r"^(\w+) = \d+$", lambda line: f"{line[1]} = {lowered[line[1]]}", text, flags=re.M)
        BOUNDS.write_text(text, encoding="utf-8")
    messages = list(wrong_lengths(package, others))
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
