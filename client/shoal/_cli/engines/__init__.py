"""Clusters of `shoal up --on ENGINE`. A module of its own for each engine imports it when it is asked for."""
