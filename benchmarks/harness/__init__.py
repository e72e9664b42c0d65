"""What benchmarks share: the command line, engines, servers, timings, results and the report."""
