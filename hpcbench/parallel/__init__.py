"""Pure integers that the worker and the oracle share: degrees, shares, the registry."""
