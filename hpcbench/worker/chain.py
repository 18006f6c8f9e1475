"""``python -m hpcbench.worker.chain``, the documented command: it runs ``hpcbench.worker.block_times``."""

from hpcbench.worker.block_times import main

if __name__ == "__main__":
    raise SystemExit(main())
