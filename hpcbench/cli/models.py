"""``models``: how large the models are."""

from __future__ import annotations

from pathlib import Path

import click

from hpcbench.cli.common import console, json_option, print_json

_SORTS = ("order", "parameters", "forward_flops", "backward_flops", "activation_bytes")


@click.command()
@click.option("--model", "names", metavar="M", multiple=True, help="Only this one; may be repeated.")
@click.option("--dataset", "datasets", metavar="D", multiple=True, help="Only with this one; may be repeated.")
@click.option("--input-size", metavar="N", type=click.IntRange(min=1), help="Edge length or tokens, not the dataset's.")
@click.option("--layers", "by_layer", is_flag=True, help="Every layer of one model on one dataset.")
@click.option("--sort", type=click.Choice(_SORTS), default="order", help="Largest first by this. (default: order)")
@click.option("--model-folder", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False),
              default=".", help="Where the module of a model of your own is. (default: this folder)")  # fmt: skip
@json_option
def models(
    names: tuple[str, ...], datasets: tuple[str, ...], input_size: int | None, by_layer: bool, sort: str,
    model_folder: Path, as_json: bool,
) -> None:  # fmt: skip
    """Show parameters, FLOPs and activation memory of every model on every dataset that it takes.

    The numbers of the shipped models come with the package. A model of your own, module:function, and other
    input sizes are measured when they are first asked for, which takes torch and a few seconds.
    """
    from hpcbench.errors import ConfigError
    from hpcbench.report.models import find_tables, layers_table, models_json, models_table, sort_tables

    tables = sort_tables(find_tables(names, datasets, input_size, model_folder), sort)
    if as_json:
        print_json(models_json(tables, sort))
        return
    if not by_layer:
        console().print(models_table(tables))
        return
    if len(tables) > 1:
        pairs = ", ".join(f"{table.model} on {table.dataset}" for table in tables[:5])
        hint = f"name one with --model and --dataset: {pairs}{', ...' if len(tables) > 5 else ''}"
        raise ConfigError(f"--layers shows one pair, and {len(tables)} were asked for", hint=hint)
    screen = console()
    screen.print(layers_table(tables[0], sort, screen.width))
