"""The metadata store, and the records in it."""
