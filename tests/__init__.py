"""Tests, in the product's tree. As packages they do not clash with other projects' ``tests``."""
