"""Messages between the stages of several processes."""

import numpy as np

from shoal_distribute.pipeline.links import Passed
from shoal_distribute.pipeline.processes.links import decoded, encoded, memory_of


def test_a_message_arrives_as_it_was_sent() -> None:
    matrix, scalar, none = np.arange(6.0, dtype=np.float32).reshape(2, 3).T, np.array(2.5), np.empty((0, 4), np.int64)
    message = [Passed(matrix, needs_gradient=True), Passed(none, needs_gradient=False)]
    said, arrays = encoded(message)
    assert [(it.shape, it.dtype) for it in memory_of(said)] == [(it.shape, it.dtype) for it in arrays]
    for found, sent in zip(decoded(said, arrays), message, strict=True):
        assert isinstance(found, Passed)
        assert found.needs_gradient is sent.needs_gradient
        np.testing.assert_array_equal(found.array, sent.array, strict=True)
    first, second = decoded(*encoded([None, scalar]))
    assert first is None
    assert second is scalar or np.array_equal(np.asarray(second), scalar)
