"""Tests; they mirror the tree. Being packages keeps other projects' ``tests`` out of the way."""
