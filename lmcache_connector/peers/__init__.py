"""Peers: instances that serve the chunks of their CPU tier to each other."""
