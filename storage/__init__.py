"""The Redis tier and the format of stored values, installed as ``lmcache_connector.storage``."""
