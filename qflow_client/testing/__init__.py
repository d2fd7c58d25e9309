"""Tools for tests of programs that publish under flow control: pytest fixtures, and private broker nodes."""
