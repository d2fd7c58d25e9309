"""Benchmarks. Each module with a command line has its own help: ``python -m benchmarks.publish --help``."""
