"""The program inside a job. The only package that imports torch."""
