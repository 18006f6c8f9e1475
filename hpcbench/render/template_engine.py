"""The template engine of job scripts: values become shell words unless a filter makes text of them."""

from __future__ import annotations

import re
import shlex
import traceback
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hpcbench.errors import RenderError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.paths import search_folders

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")


class TemplateEngine:
    """Renders templates; those of the project and of the user's folder override the shipped ones by name."""

    def __init__(self, folders: list[Path] | None = None) -> None:
        self.folders = search_folders("templates") if folders is None else folders
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([str(folder) for folder in self.folders]),
            undefined=jinja2.StrictUndefined,
            autoescape=True,
            finalize=_quote_shell_word,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        self._environment.filters.update(
            raw=Markup,
            directive=_quote_directive,
            variable=_check_variable_name,
            comment=_comment_text,
            expandable=_quote_expandable,
        )

    def render(self, name: str, context: dict[str, Any]) -> str:
        """The text of the template ``name``. Raises ``RenderError`` with the template's file and line."""
        try:
            return self._environment.get_template(name).render(context)
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(f"{error.message}", where=f"{error.filename or error.name}:{error.lineno}") from error
        except jinja2.UndefinedError as error:
            match = re.match(r"'(\w+)' is undefined", str(error.message))
            hint = did_you_mean(match[1], context) if match else None
            raise RenderError(str(error.message), where=self._where(error), hint=hint) from error
        except jinja2.TemplateNotFound as error:
            folders = ", ".join(str(folder) for folder in self.folders)
            raise RenderError(f"no template {error.name!r} in {folders or 'any folder'}") from error
        except (TypeError, ValueError) as error:
            raise RenderError(str(error), where=self._where(error)) from error

    def _where(self, error: Exception) -> str | None:
        """The innermost line of a template that the error passed through."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if any(Path(frame.filename).is_relative_to(folder) for folder in self.folders):
                return f"{frame.filename}:{frame.lineno}"
        return None


def _quote_shell_word(value: Any) -> Any:
    """Return the text of ``{{ value }}``: one shell word, unless a filter or a block has made it text of a script."""
    if isinstance(value, (Markup, jinja2.Undefined)):
        return value
    text = str(value)
    if "\x00" in text:
        raise ValueError(f"{text!r} holds a NUL, which no shell word can")
    return Markup(shlex.quote(text))  # noqa: S704 - quoted for the shell; no HTML is made here


def _quote_directive(value: Any) -> Markup:
    """A name or a value on an #SBATCH line, which sbatch reads with quotes of its own but never over a line's end."""
    text = str(value)
    if _CONTROL_CHARACTERS.search(text):
        raise ValueError(f"{printable_text(text)!r} cannot stand in an #SBATCH line: it holds a control character")
    return Markup(shlex.quote(text))  # noqa: S704


def _check_variable_name(value: Any) -> Markup:
    """The name of an environment variable."""
    if not _VARIABLE_NAME.fullmatch(str(value)):
        raise ValueError(f"{printable_text(str(value))!r} is not a name of an environment variable")
    return Markup(str(value))  # noqa: S704


def _quote_expandable(value: Any) -> Markup:
    """A path as one word in which ``$VARIABLES`` are the job's; nothing else in it means anything to the shell."""
    text = str(value)
    parts = re.split(r"(\$[A-Za-z_][A-Za-z0-9_]*)", text)
    return Markup("".join(f'"{part}"' if part.startswith("$") else shlex.quote(part) for part in parts if part))  # noqa: S704


def _comment_text(value: Any) -> Markup:
    """Text within a comment: on one line, whatever it holds."""
    return Markup(_CONTROL_CHARACTERS.sub(" ", printable_text(str(value))))  # noqa: S704
