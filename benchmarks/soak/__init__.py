"""A soak: producers publish while everything around them fails, and an audit holds what is left against what was said.

``python -m benchmarks.soak`` runs it; see ``--help``.
"""
