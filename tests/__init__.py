"""Tests; their tree mirrors the product's. As packages they cannot be mixed up with other projects'
``tests``."""
