"""The colours of states, the same wherever they are shown; rich and click know them by these names."""

from __future__ import annotations

STATUS_STYLE = {
    "ok": "green",
    "lost": "red",
    "failed": "red",
    "timeout": "yellow",
    "cancelled": "yellow",
    "oom": "magenta",
}
