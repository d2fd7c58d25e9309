"""Applications of four frameworks, and one under gevent, under an alarm and while their connections are cut."""
