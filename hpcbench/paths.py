"""Locations of profiles, templates, sweeps, data and results: the project first, then the user's folder, then the
package.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE_FOLDER = Path(__file__).resolve().parent

PROJECT_FILE = "hpcbench.toml"
"""The project's own settings."""


def shared_folder(kind: str) -> Path:
    """The shipped ``templates``, ``clusters`` or ``sweeps``.

    A wheel carries them in ``_share``; an editable install reads the folders beside the package.
    """
    packaged = _PACKAGE_FOLDER / "_share" / kind
    return packaged if packaged.is_dir() else _PACKAGE_FOLDER.parent / kind


def layer_tables_folder() -> Path:
    """The shipped tables of layers; in the package itself, beside the models that they describe."""
    return _PACKAGE_FOLDER / "layers"


def is_visible(path: str | Path) -> bool:
    """Whether ``path`` exists; ``False`` in a folder that this user may not enter, for which Path's methods raise."""
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder, as ``is_visible``."""
    return os.path.isdir(path)  # noqa: PTH112


def project_folder() -> Path:
    """The nearest folder, this one or above, with ``hpcbench.toml``, ``clusters`` or ``templates``; else this one."""
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if is_folder(folder / "clusters") or is_folder(folder / "templates") or is_visible(folder / PROJECT_FILE):
            return folder
    return here


def expand_home(path: str) -> Path:
    """Replace a leading ``~``; it stays where there is no such user, or no home."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises


def _home() -> Path:
    """The home of this user; a folder that does not exist where the user has none."""
    home = expand_home("~")
    return home if home.is_absolute() else Path("/nonexistent")


def user_folder() -> Path:
    """``~/.config/hpcbench``, or below XDG_CONFIG_HOME."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else _home() / ".config") / "hpcbench"


def cache_folder() -> Path:
    """``~/.cache/hpcbench``, or below XDG_CACHE_HOME: files that can be made again at any time."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else _home() / ".cache") / "hpcbench"


def user_data_folder() -> Path:
    """``~/.local/share/hpcbench``, or below XDG_DATA_HOME: measurements that belong to no results tree."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else _home() / ".local" / "share") / "hpcbench"


def search_folders(kind: str) -> list[Path]:
    """The folders of ``kind`` that exist, the one that wins first."""
    folders = [project_folder() / kind, user_folder() / kind, shared_folder(kind)]
    unique = dict.fromkeys(folder.resolve() for folder in folders)
    return [folder for folder in unique if is_folder(folder) and os.access(folder, os.R_OK | os.X_OK)]


def data_folder(folder: str | None = None, of_profile: str | None = None) -> str:
    """Return ``folder``, else ``$HPCBENCH_DATA``, else the profile's, else ``data`` in the project.

    ``~`` and variables are left for ``expanded``: a profile's are those of the node that reads the files.
    """
    chosen = folder or os.environ.get("HPCBENCH_DATA") or of_profile
    if chosen and chosen.startswith(("~", "$")):
        return chosen
    return str((Path.cwd() if folder else project_folder()) / (chosen or "data"))


def expand_path(path: str) -> Path:
    """Replace the home and the variables of this process in ``path``; an unset variable stays."""
    return expand_home(os.path.expandvars(path))


def results_folder(folder: str | None = None) -> Path:
    """Return ``folder``, else ``$HPCBENCH_RESULTS``, else ``results`` in the project."""
    chosen = folder or os.environ.get("HPCBENCH_RESULTS")
    return Path(chosen).absolute() if chosen else project_folder() / "results"


def resolve_beside(file: Path, folder: str) -> Path:
    """A folder that ``file`` names; links stay, since a node may see only the path that was written."""
    return Path(os.path.abspath(file.parent / expand_home(folder)))  # noqa: PTH100 - resolve() follows links
