"""The command line: verbs only, no logic of its own."""
