"""Spans for a request's KV, in the request's own trace."""
