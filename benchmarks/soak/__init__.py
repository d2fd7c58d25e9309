"""A soak test: producers publish while everything around them fails, and an audit compares the queue with the reports.

``python -m benchmarks.soak`` runs it; see ``--help``.
"""
