"""``python -m hpcbench.worker.build_horovod``, the documented command: it runs ``hpcbench.tools.build_horovod``."""

from hpcbench.tools.build_horovod import main

if __name__ == "__main__":
    raise SystemExit(main())
