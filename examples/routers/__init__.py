"""For use with prefix-aware routers."""
