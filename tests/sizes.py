"""The size promise: files of at most 400 lines, functions of at most 80. Exits 1 with a list of what is longer."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 80


def too_long(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    found = []
    count = text.count("\n")
    if count > FILE_LINES:
        found.append(f"{path}: {count} lines, at most {FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}")
    return found


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    problems = [
        line
        for folder in ("hpcbench", "tests", "benchmarks")
        for path in sorted((root / folder).rglob("*.py"))
        for line in too_long(path.relative_to(root))
    ]
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(1 if problems else 0)
