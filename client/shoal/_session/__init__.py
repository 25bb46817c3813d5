"""Parts of a session that do not train: trees of arrays, their conversion, and words about waits. Pure, or nearly so.

`shoal.session` and `shoal.client` use this package. `shoal._training` has the pulls and pushes.
"""
