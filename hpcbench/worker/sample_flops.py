"""How many FLOPs one sample costs a run's model: what FLOP/s and MFU are computed from."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.layers import LayerRequest, read_table


def flops_per_sample(spec: RunSpec, model_folder: str | None, warnings: list[str]) -> float | None:
    """Forward and backward FLOPs of a run's model: from the shipped table, else measured here and now.

    Where that fails the run has no such figure, and ``warnings`` says why.
    """
    try:
        table = read_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
        if table is None:
            # Fake tensors take a second to import, which no run should wait for before its first step.
            from hpcbench.worker.layers import layer_table

            request = LayerRequest(
                model=spec.model,
                dataset=spec.dataset,
                input_size=spec.input_size,
                model_options=spec.model_options,
                model_folder=model_folder,
            )
            table = layer_table(request)
    except Exception as error:  # noqa: BLE001 - what was measured counts, whatever is wrong with the table
        warnings.append(f"no FLOP/s: {getattr(error, 'message', None) or f'{type(error).__name__}: {error}'}")
        return None
    return float(table.flops_per_sample())
