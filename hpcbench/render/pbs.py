"""What a job asks PBS Professional for: the #PBS lines of a shape of run on a cluster."""

from __future__ import annotations

from hpcbench.config.cluster import ClusterProfile
from hpcbench.render.shape import Shape, job_limit_s


def directives(
    shape: Shape, profile: ClusterProfile, job_name: str, folder: str, pack: int = 1, runs: int = 1
) -> list[tuple[str, str | bool]]:
    """Option letters and values; ``True`` is an option without a value, a letter may come several times.

    The range of the array stands in the script: whoever calls qsub need not know it.
    """
    partition = profile.partition(shape.partition)
    jobs = -(-runs // pack)
    select = f"select={shape.nodes}:mpiprocs={shape.tasks_per_node}"
    lines: dict[str, str | bool | int | list[str] | None] = {
        "N": job_name,
        "P": profile.account,
        "q": (partition.name or shape.partition) if shape.partition else None,
        "l": [select, f"walltime={_clock(job_limit_s(shape, pack))}"],
        "J": f"0-{jobs - 1}" if jobs > 1 else None,
        # Otherwise the shell that the person logs in with reads the script.
        "S": "/bin/bash",
        "j": "oe",
        "o": f"{folder}/",
    }
    lines.update(profile.directives)
    lines.update(partition.directives)
    for name in profile.request_of(shape.partition).drop:
        lines.pop(name, None)
    return [
        (name, one if one is True else str(one))
        for name, value in lines.items()
        if value is not None and value is not False
        for one in (value if isinstance(value, list) else [value])
    ]


def _clock(seconds: float) -> str:
    whole = max(1, int(-(-seconds // 1)))
    return f"{whole // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
