"""Descriptions of a job's fields: what a field says about itself, and what is derived from that.

`description` is what `Job` and its policies attach to their fields; `checks` and `codecs` are what descriptions are
made of; `settings` is the JSON of a program's arguments. Nothing here knows `Job`, a particular field, or typer.
"""
