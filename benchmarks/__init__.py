"""Measurements; each module with a command line says how it is run: ``python -m benchmarks.publish --help``."""
