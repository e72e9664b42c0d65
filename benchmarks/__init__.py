"""Benchmarks of the connector: ``python -m benchmarks NAME --json PATH|-``."""
