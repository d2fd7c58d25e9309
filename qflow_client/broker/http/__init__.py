"""The broker over HTTP: a JSON API with its OpenAPI description, an event stream, and metrics for Prometheus."""
