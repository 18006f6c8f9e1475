"""Users' own models as far as their source text shows without execution."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcbench.errors import ConfigError, did_you_mean

CUSTOM_MODEL_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


def is_custom_model(model: str) -> bool:
    """Whether a model's name means a user's own; those of the shipped ones have no colon."""
    return ":" in model


def custom_model_file(model: str, folder: Path) -> Path | None:
    """The file of the model's module below ``folder``, if it is there."""
    place = folder.joinpath(*model.partition(":")[0].split("."))
    candidates = (place / "__init__.py", place.with_name(place.name + ".py"))
    return next((path for path in candidates if path.is_file()), None)


def check_custom_model(model: str, folder: Path | None, where: str) -> ConfigError | None:
    """Return the error in ``model`` as far as its text shows it; nothing of it is executed.

    ``where`` is the place of its name. Without a ``folder`` only the form is looked at.
    """
    if not re.match(CUSTOM_MODEL_PATTERN, model):
        return ConfigError(
            f"{model!r} is no model of your own",
            where=where,
            hint="write it as 'module:function' or 'package.module:function'",
        )
    if folder is None:
        return None
    module, _, function = model.partition(":")
    path = custom_model_file(model, folder)
    if path is None:
        siblings = sorted(folder.joinpath(*module.split(".")[:-1]).glob("*.py"))[:_MAX_LISTED_MODULES]
        near = (".".join(file.relative_to(folder).with_suffix("").parts) for file in siblings)
        return ConfigError(
            f"model {model!r}: there is no {module.replace('.', '/')}.py in {folder}",
            where=where,
            hint=did_you_mean(module, {name.removesuffix(".__init__") for name in near}),
        )
    try:
        names = set(_top_level_names(ast.parse(path.read_bytes(), str(path)).body))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        said = getattr(error, "msg", None) or error
        return ConfigError(f"model {model!r}: not valid Python: {said}", where=f"{path}:{line}" if line else str(path))
    except OSError as error:
        return ConfigError(f"model {model!r}: cannot read {path}: {error.strerror}", where=where)
    if function in names or "*" in names:
        return None
    return ConfigError(
        f"model {model!r}: {path} has no function {function!r}", where=where, hint=did_you_mean(function, names)
    )


_MAX_LISTED_MODULES = 1000


def _top_level_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module defines at its top level, also below ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _top_level_names(node.body)
            yield from _top_level_names(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level_names(handler.body)
