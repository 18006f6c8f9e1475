"""Count the package's structure and compare it with the bounds of ``structure.toml``.

The exit code is 1 if a count is above its bound, or below it, since the bound is then too high.

``--table`` prints the figures of every package. ``--tighten`` lowers the bounds in ``structure.toml`` to the counts.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tomli

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hpcbench"
LAYOUT_TOKENS = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
STRATEGY_FOLDER = "strategies"
"""Below it, registry entry, runtime and cost of a family share their file name on purpose."""


class Import(NamedTuple):
    """One import statement of a module of the package."""

    target: str
    line: int
    is_deferred: bool
    is_for_types: bool


@dataclass
class Module:
    """One file of the package."""

    path: Path
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def code_lines(self) -> int:
        """Lines with a token, without those of docstrings, comments and constant strings that stand alone."""
        documentation: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in LAYOUT_TOKENS:
                code.update(range(token.start[0], token.end[0] + 1))
        return len(code - documentation)

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, is_deferred=False, is_for_types=False))

    def _imports(self, node: ast.AST, *, is_deferred: bool, is_for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, is_deferred, is_for_types)
            elif isinstance(child, ast.ImportFrom):
                base = self._absolute(child)
                for alias in child.names:
                    yield Import(f"{base}.{alias.name}", child.lineno, is_deferred, is_for_types)
            else:
                types = is_for_types or (
                    isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
                )
                deferred = is_deferred or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from self._imports(child, is_deferred=deferred, is_for_types=types)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        above = self.name.split(".")[: -(node.level - self.is_package) or None]
        return ".".join([*above, *([node.module] if node.module else [])])

    @property
    def deferred_imports(self) -> int:
        """Import statements inside functions."""
        return len({each.line for each in self.imports if each.is_deferred})

    @property
    def public_classes(self) -> list[str]:
        return [
            node.name for node in self.tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]

    def functions(self) -> Iterator[tuple[str, int, int]]:
        """Name, first line and number of lines of every function."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def read_modules(folder: str) -> list[Module]:
    """Every module below ``folder`` of the checkout that is not empty."""
    modules = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.strip():
            modules.append(Module(path.relative_to(ROOT), text))
    return modules


def repeated_file_names(modules: list[Module]) -> dict[str, list[str]]:
    """File names that stand for several modules, those of strategy families excepted."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if not module.path.name.startswith("__") and STRATEGY_FOLDER not in module.path.parts:
            by_name[module.path.name].append(str(module.path))
    return {name: paths for name, paths in sorted(by_name.items()) if len(paths) > 1}


def repeated_class_names(modules: list[Module]) -> dict[str, list[str]]:
    """Public class names that several modules define."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in module.public_classes:
            by_name[name].append(str(module.path))
    return {name: paths for name, paths in sorted(by_name.items()) if len(paths) > 1}


def import_cycles(modules: list[Module]) -> list[list[str]]:
    """Groups of modules that import each other, deferred imports counted and imports for type checkers not."""
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {
        module.name: {
            target
            for each in module.imports
            if not each.is_for_types
            and (target := _module_of(each.target, names)) is not None
            and target != module.name
        }
        for module in modules
    }
    return sorted(sorted(group) for group in _strongly_connected(graph) if len(group) > 1)


def _module_of(target: str, names: set[str]) -> str | None:
    """The module that an import of ``target`` needs: itself or the one that defines it."""
    if target in names:
        return target
    parent = target.rpartition(".")[0]
    return parent if parent in names else None


def _strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components (Kosaraju's algorithm)."""
    order: list[str] = []
    visited: set[str] = set()

    def finish(node: str, edges: dict[str, set[str]], output: list[str]) -> None:
        stack = [(node, iter(edges.get(node, ())))]
        visited.add(node)
        while stack:
            current, rest = stack[-1]
            following = next((other for other in rest if other not in visited and other in graph), None)
            if following is None:
                stack.pop()
                output.append(current)
            else:
                visited.add(following)
                stack.append((following, iter(edges.get(following, ()))))

    for node in graph:
        if node not in visited:
            finish(node, graph, order)
    reverse: dict[str, set[str]] = defaultdict(set)
    for node, targets in graph.items():
        for target in targets:
            reverse[target].add(node)
    visited.clear()
    components = []
    for node in reversed(order):
        if node not in visited:
            component: list[str] = []
            finish(node, reverse, component)
            components.append(set(component))
    return components


def plan_parameter_files(modules: list[Module]) -> list[str]:
    """Files with a function that takes the plan of a sweep: all that the parameter ``plan`` of ``submit`` can pass."""
    return [
        str(module.path)
        for module in modules
        if any(
            isinstance(node, ast.arg) and node.annotation is not None and "SweepPlan" in ast.unparse(node.annotation)
            for node in ast.walk(module.tree)
        )
    ]


def measure(modules: list[Module]) -> dict[str, float]:
    """The figures that ``structure.toml`` bounds."""
    files = [module for module in modules if not module.is_package]
    return {
        "package_files": len(modules),
        "code_lines": sum(module.code_lines for module in modules),
        "median_file_lines": statistics.median(module.lines for module in files),
        "repeated_file_names": len(repeated_file_names(modules)),
        "repeated_class_names": len(repeated_class_names(modules)),
        "import_cycles": len(import_cycles(modules)),
        "deferred_imports": sum(module.deferred_imports for module in modules),
        "longest_file_lines": max(module.lines for module in modules),
        "plan_parameter_files": len(plan_parameter_files(modules)),
    }


def tighten(path: Path, modules: list[Module]) -> None:
    """Lower every bound of ``at_most`` that is above its figure."""
    text, measured = path.read_text(encoding="utf-8"), measure(modules)
    for key, most in tomli.loads(text)["at_most"].items():
        text = text.replace(f"{key} = {most}\n", f"{key} = {min(most, measured[key])}\n")
    path.write_text(text, encoding="utf-8")


def violations(modules: list[Module], bounds: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A message for every figure that is out of its bounds, with the places that count."""
    measured = measure(modules)
    for key, most in bounds["at_most"].items():
        if measured[key] > most:
            yield f"{key}: {measured[key]:.0f}, at most {most:.0f}"
            yield from _places(key, modules, most)
        elif measured[key] < most:
            yield f"{key}: {measured[key]:.0f}; tighten its bound of {most:.0f} to {measured[key]:.0f} (--tighten)"
    for key, (least, most) in bounds["between"].items():
        if not least <= measured[key] <= most:
            yield f"{key}: {measured[key]:g}, at least {least:g} and at most {most:g}"
    file_lines, function_lines = bounds["everywhere"]["file_lines"], bounds["everywhere"]["function_lines"]
    for module in [*modules, *read_modules("tests"), *read_modules("benchmarks")]:
        if module.lines > file_lines:
            yield f"{module.path}: {module.lines} lines, at most {file_lines:g}"
        for name, line, length in module.functions():
            if length > function_lines:
                yield f"{module.path}:{line}: {name} has {length} lines, at most {function_lines:g}"


def _places(key: str, modules: list[Module], most: float) -> Iterator[str]:
    if key == "repeated_file_names":
        yield from (f"  {name}: {', '.join(paths)}" for name, paths in repeated_file_names(modules).items())
    elif key == "repeated_class_names":
        yield from (f"  {name}: {', '.join(paths)}" for name, paths in repeated_class_names(modules).items())
    elif key == "import_cycles":
        yield from (f"  {' <-> '.join(cycle)}" for cycle in import_cycles(modules))
    elif key == "longest_file_lines":
        yield from (f"  {module.path}: {module.lines} lines" for module in modules if module.lines > most)
    elif key == "plan_parameter_files":
        yield from (f"  {path}" for path in plan_parameter_files(modules))
    elif key == "deferred_imports":
        counts = sorted(((module.deferred_imports, str(module.path)) for module in modules), reverse=True)
        yield from (f"  {path}: {count}" for count, path in counts[:20] if count)


def print_table(modules: list[Module]) -> None:
    """One row a package: files, lines, lines of code, median file, deferred imports."""
    by_package: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        by_package[module.path.parts[1] if len(module.path.parts) > 2 else "(root)"].append(module)
    print(f"{'package':<12}{'files':>7}{'lines':>8}{'code':>8}{'median':>8}{'deferred':>10}")
    for name, members in [*sorted(by_package.items()), ("sum", modules)]:
        print(
            f"{name:<12}{len(members):>7}{sum(each.lines for each in members):>8}"
            f"{sum(each.code_lines for each in members):>8}{statistics.median(each.lines for each in members):>8g}"
            f"{sum(each.deferred_imports for each in members):>10}"
        )
    for key, value in measure(modules).items():
        print(f"{key}: {value:g}")


def main() -> int:
    """Print the table or the violations; the exit code is 1 if there are any."""
    modules, path = read_modules(PACKAGE), ROOT / "tests" / "structure.toml"
    if "--table" in sys.argv:
        print_table(modules)
        return 0
    if "--tighten" in sys.argv:
        tighten(path, modules)
    messages = list(violations(modules, tomli.loads(path.read_text(encoding="utf-8"))))
    print("\n".join(messages), end="\n" if messages else "")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
