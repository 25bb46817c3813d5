"""Descriptions of a job's fields: their checks, encodings, options and JSON.

`Job` and its policies attach a description to each of their fields. The module `description` defines descriptions, and
`checks` and `codecs` define their parts. `settings` converts a program's arguments to JSON. This package does not
depend on `Job`, its fields or typer.
"""
