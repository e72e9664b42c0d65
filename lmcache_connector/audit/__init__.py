"""Audits of stored KV: the comparison with recomputed KV, its limits, and the consequences."""
