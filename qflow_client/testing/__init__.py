"""Tools for tests of programs that publish: pytest fixtures, a fault proxy, broker processes and depth drawings."""
