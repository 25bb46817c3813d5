"""Checkpoints: a server's part of a cut, and its writing."""
