"""A machine's numbers from a few whole runs, drawn to what was known before where the runs cannot tell."""
