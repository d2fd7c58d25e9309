"""The HTTP API of the broker: JSON with an OpenAPI description, an event stream, and metrics for Prometheus."""
