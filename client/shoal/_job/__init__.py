"""Descriptions of a job's fields: their checks, encodings, options and JSON.

`Job` and its policies attach a description to each field, which the module `description` defines. A description
consists of `checks` and `codecs`; `settings` converts a program's arguments to JSON. This package does not depend on
`Job`, its fields or typer.
"""
