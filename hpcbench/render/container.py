"""Containers in the three places where runtimes want to be named: the command, srun's options, sbatch's options."""

from __future__ import annotations

from hpcbench.config.jobs import Container

_EXEC = {"apptainer": ["apptainer", "exec"], "singularity": ["singularity", "exec"]}


def command_prefix(container: Container | None) -> list[str]:
    """The words before the interpreter."""
    if container is None:
        return []
    if container.command is not None:
        return container.command
    image = container.image or ""
    if container.kind in _EXEC:
        binds = [word for mount in container.mounts for word in ("--bind", mount)]
        return [*_EXEC[container.kind], *container.options, *binds, image]
    if container.kind == "shifter":
        return ["shifter", *container.options]
    if container.kind == "podman-hpc":
        volumes = [word for mount in container.mounts for word in ("--volume", mount)]
        # The ranks are told who they are, and what the profile sets, by variables of the host.
        return ["podman-hpc", "run", "--rm", "--env-host", *container.options, *volumes, image]
    return []


def step_options(container: Container | None, variables: list[str]) -> list[str]:
    """What srun is told. ``variables`` are those that the container must not replace by its image's own."""
    if container is None:
        return []
    if container.kind == "pyxis":
        words = [f"--container-image={container.image}"]
        if container.mounts:
            words.append(f"--container-mounts={','.join(container.mounts)}")
        if variables:
            words.append(f"--container-env={','.join(variables)}")
        return [*words, *container.options]
    if container.kind == "cscs-engine":
        return [f"--environment={container.image}", *container.options]
    return []


def job_options(container: Container | None) -> dict[str, str]:
    """Directives that prepare the container on the job's nodes."""
    if container is None or container.image is None:
        return {}
    if container.kind == "shifter":
        given = {"image": container.image}
        if container.mounts:
            given["volume"] = ";".join(container.mounts)
        return given | ({"module": ",".join(container.modules)} if container.modules else {})
    if container.kind == "uenv":
        given = {"uenv": container.image}
        return given | ({"view": ",".join(container.modules)} if container.modules else {})
    return {}
