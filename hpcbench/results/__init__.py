"""The results tree on disk: records, attempts, index, bundles, and the statistics of step times."""
