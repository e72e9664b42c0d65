"""The pictures in the documentation, drawn from real runs."""
