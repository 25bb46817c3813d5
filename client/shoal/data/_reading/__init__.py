"""The order of a data set, and reading it ahead."""
