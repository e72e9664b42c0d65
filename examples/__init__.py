"""Programs to read, run and copy. Run them from the root: ``python -m examples.demo``."""
