"""TOML files as typed values: profiles, sweeps, and the specification of one run."""
