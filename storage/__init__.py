"""The Redis tier and the form of what it stores, installed as ``lmcache_connector.storage``."""
