"""The command line ``lmcache-connector``. Each command's module is imported when it runs."""
