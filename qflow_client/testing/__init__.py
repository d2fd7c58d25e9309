"""Tools for tests of programs that publish: pytest fixtures, a fault proxy, private brokers and depth drawings."""
