"""Whether stored KV is what this engine computes: the comparison, its limits, and what follows."""
