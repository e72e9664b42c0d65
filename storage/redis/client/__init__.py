"""One bounded conversation with a Redis server: address, protocol, connecting."""
