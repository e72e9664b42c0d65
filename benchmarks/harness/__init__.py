"""Shared by benchmarks: the command line, engines, servers, timings, results and the report."""
