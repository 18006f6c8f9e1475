"""The block of /etc/hosts through which node names resolve on the machine and on every node."""

from __future__ import annotations

from . import paths
from .errors import BoxError
from .options import Options


def without_block(text: str) -> str:
    """The file without the box's lines; a block whose end is missing reaches to the end of the file."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.rstrip("\n") == paths.HOSTS_BEGIN:
            inside = True
        if not inside:
            kept.append(line)
        if line.rstrip("\n") == paths.HOSTS_END:
            inside = False
    return "".join(kept)


def with_block(text: str, options: Options) -> str:
    """The file with the box's lines at its end."""
    rest = without_block(text)
    if rest and not rest.endswith("\n"):
        rest += "\n"
    lines = [f"{options.address(node)} {node}" for node in options.names]
    # Programs on a node look up who connects to them: the machine needs a name on the bridge as well.
    lines.append(f"{options.controller_address} {paths.CONTROLLER_NAME}")
    return rest + "\n".join([paths.HOSTS_BEGIN, *lines, paths.HOSTS_END]) + "\n"


def conflicts(text: str, names: list[str]) -> list[str]:
    """Names that the rest of the file already gives to other hosts."""
    taken: set[str] = set()
    for line in without_block(text).splitlines():
        taken |= set(line.split("#")[0].split()[1:])
    return [name for name in names if name in taken]


def check(options: Options) -> None:
    taken = conflicts(paths.HOSTS_FILE.read_text(), options.names)
    if taken:
        raise BoxError(f"{paths.HOSTS_FILE} already names {', '.join(taken)}: the box needs these names, rename yours")


def write(options: Options) -> None:
    _replace(with_block(paths.HOSTS_FILE.read_text(), options))


def remove() -> None:
    _replace(without_block(paths.HOSTS_FILE.read_text()))


def _replace(text: str) -> None:
    # Written in place: in containers the file is a mount and cannot be renamed over.
    if text != paths.HOSTS_FILE.read_text():
        paths.HOSTS_FILE.write_text(text)
