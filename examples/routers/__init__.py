"""Beside prefix-aware routers."""
