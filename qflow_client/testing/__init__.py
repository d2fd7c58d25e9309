"""Tools for tests of programs that publish with flow control: pytest fixtures, and private broker nodes."""
