"""Results as files for other programs, and the table as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.spec import RunSpec, as_dict
from hpcbench.fileio import write_atomic
from hpcbench.report.files import encoder
from hpcbench.report.rows import Row
from hpcbench.report.view import Column, View
from hpcbench.results.schema import RunResult, result_json


def export(results: list[RunResult], path: Path) -> None:
    """Write ``results`` in the format that the file's ending names. Nested values become columns ``a.b``."""
    encode = encoder(path)
    if path.suffix == ".json":
        document = {"results": [result_json(result) for result in results]}
        write_atomic(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
        return
    import polars

    frame = polars.DataFrame([flat(result) for result in results], infer_schema_length=None, strict=False)
    columns = [Column(name, name, is_number=dtype.is_numeric()) for name, dtype in frame.schema.items()]
    raw = [list(row) for row in frame.iter_rows()]
    cells = [["" if value is None else str(value) for value in row] for row in raw]
    write_atomic(path, encode(View("results", columns, raw, cells)))


def flat(result: RunResult) -> dict[str, Any]:
    """One row per run: every parameter of the spec, defaults included, and every metric; no raw step times."""
    row: dict[str, Any] = {
        name: getattr(result, name) for name in ("run_id", "config_id", "attempt", "sweep", "cluster", "status")
    }
    for name in RunSpec.__struct_fields__:
        row |= _columns(f"spec.{name}", getattr(result.spec, name))
    row |= _columns("metrics", msgspec.to_builtins(result.metrics))
    verification = msgspec.to_builtins(result.verification) if result.verification else {}
    row |= _columns("verification", {name: value for name, value in verification.items() if name != "notes"})
    row |= _columns("error", msgspec.to_builtins(result.error) if result.error else {})
    row["environment_digest"] = result.environment_digest
    row["warnings"] = "; ".join(result.warnings)
    return row


def _columns(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= _columns(f"{name}.{key}", inner)
        return found
    return {name: value}


def table_json(rows: list[Row]) -> dict[str, Any]:
    """``{"columns", "rows"}``: the table with all figures in SI units."""
    documents = []
    for row in rows:
        # dataclasses.asdict would copy every list and parameter first.
        document = {name: getattr(row, name) for name in Row.__dataclass_fields__}
        document["spec"] = as_dict(row.spec) if row.spec is not None else None
        documents.append(document)
    return {"columns": list(Row.__dataclass_fields__), "rows": documents}
