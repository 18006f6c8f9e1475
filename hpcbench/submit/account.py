"""Whom a job is charged to: known before anything is written or sent."""

from __future__ import annotations

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import ConfigError
from hpcbench.paths import user_folder


def missing_account(profile: ClusterProfile) -> ConfigError | None:
    """The mistake, where the site takes no job without an account and neither profile nor user names one."""
    if not profile.account_required or profile.account is not None:
        return None
    return ConfigError(
        f"cluster {profile.name} takes no job without an account",
        hint=f'put it into {user_folder() / "config.toml"}, below [accounts]: {profile.name} = "..."',
    )


def check_account(profile: ClusterProfile) -> None:
    """Raise what ``missing_account`` finds."""
    missing = missing_account(profile)
    if missing is not None:
        raise missing
