"""Leaves these tests out of every run that is not under the stub: other environments have torch's build for CPUs.

Nothing is skipped silently: ``make test-cuda`` runs all of them, and fails where it cannot.
"""

from __future__ import annotations

from tests.cuda.environment import is_under_stub

collect_ignore_glob = [] if is_under_stub() else ["test_*.py"]
