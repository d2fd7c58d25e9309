"""Checks of this repository: stages in lanes for a change, nightly parts, repeated suites, mutants."""
