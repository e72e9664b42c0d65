"""What happens to a request's KV, as spans of the request's own trace."""
