"""The floor of expansion and rendering: a product, a hash and a script for every point, in plain Python.

``python benchmarks/naive_sweep.py FOLDER STEPS`` makes 200 x STEPS points, each a folder with two small files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from pathlib import Path

import jinja2

SCRIPT = """#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node={{ tasks_per_node }}
#SBATCH --time=00:30:00
export OMP_NUM_THREADS=1
srun python train.py --config config.json
"""


def main(folder: Path, steps: int) -> None:
    template = jinja2.Template(SCRIPT)
    axes = {
        "nodes": [1, 2, 4, 8],
        "tasks_per_node": [1, 2, 3, 4, 8],
        "batch_size": [2**power for power in range(10)],
        "learning_rate": [number / 10_000 for number in range(1, steps + 1)],
    }
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        text = json.dumps(point, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
        (folder / name / "job.sh").write_text(template.render(name=name, **point))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
