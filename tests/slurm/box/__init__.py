"""A real SLURM cluster of several nodes on one Linux machine, for people and for tests."""

from __future__ import annotations

from pathlib import Path

from . import lifecycle, paths, status
from .errors import BoxError
from .options import Options

__all__ = ["Box", "BoxError", "Options"]


class Box:
    """The one box of this machine."""

    slurm_conf: Path = paths.SLURM_CONF

    @property
    def options(self) -> Options | None:
        """Options of the box that is up; None when there is none."""
        return status.saved_options()

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes of the box that is up."""
        options = status.saved_options()
        return options.names if options else []

    def up(self, options: Options | None = None) -> bool:
        """Have a healthy box with these options; False when there was one already."""
        return lifecycle.up(options or Options())

    def down(self) -> bool:
        """Remove the box and everything it made; False when there was none."""
        return lifecycle.down()

    def is_healthy(self) -> bool:
        return status.is_healthy(status.report())

    def kill_node(self, name: str) -> None:
        """End every process of the node at once, as a power cut does."""
        lifecycle.kill_node(name)

    def restart_node(self, name: str) -> None:
        """Start the node again and wait until it takes jobs."""
        lifecycle.restart_node(name)

    def stop_daemon(self, name: str) -> None:
        """Stop one of munged, mariadbd, slurmdbd, slurmctld."""
        lifecycle.stop_daemon(name)

    def start_daemon(self, name: str) -> None:
        """Start it again and wait until it answers."""
        lifecycle.start_daemon(name)
