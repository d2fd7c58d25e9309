"""Applications of four frameworks, and one with gevent, during an alarm and while their connections are cut."""
