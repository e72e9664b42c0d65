"""A Redis client with bounded replies: URL, protocol, connecting."""
