"""Other connectors and plain transfers, to compare the connector with."""
