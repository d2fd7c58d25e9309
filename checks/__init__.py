"""What checks this repository: stages in lanes for a change, parts for the night, repeated suites, mutants."""
