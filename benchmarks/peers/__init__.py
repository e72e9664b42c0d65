"""What the connector is compared with: other connectors, and sockets with nothing around them."""
