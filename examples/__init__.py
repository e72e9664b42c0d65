"""Programs to read, run and copy from. Run them from the root: ``python -m examples.demo``."""
