"""Parts of a session besides its pulls and pushes: entry, trees of arrays, batches, reports and notices about waits.

`shoal.session` and `shoal.client` use this package. `shoal._training` has the pulls and pushes.
"""
