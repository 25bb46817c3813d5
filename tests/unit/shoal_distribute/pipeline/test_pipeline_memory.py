"""Memory of pipelines: what a cut by costs counts is what the stages hold, and models are freed with their last use."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from shoal import errors
from shoal_distribute import MirroredStrategy, PipelineStrategy, keras

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 6)).astype("float32"), RNG.normal(size=(16, 3)).astype("float32")


def trained(strategy: PipelineStrategy, frozen: bool = False) -> keras.Model:
    with strategy.scope():
        layers = [keras.layers.Dense(width, "relu") for width in (64, 64, 64, 3)]
        model = keras.Sequential([keras.Input((6,)), *layers], name="net")
        for layer in model.layers[:2]:  # those of the first stage
            layer.trainable = not frozen
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=16, verbose=0)
    return model


def peaks(model: keras.Model) -> list[int]:
    strategy: Any = model.strategy
    return [it.peak_bytes for it in strategy.timings().stages]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_cut_by_costs_fits_limits_that_a_given_cut_fits(recompute: bool) -> None:
    with PipelineStrategy(stages=2, micro_batches=4, cut=[2, 2], recompute=recompute) as strategy:
        limits = peaks(trained(strategy))
    with PipelineStrategy(stages=2, micro_batches=4, recompute=recompute, memory_limit=limits) as strategy:
        model = trained(strategy)
        assert [len(it.layers) for it in strategy.timings().stages] == [2, 2]
        assert peaks(model) == limits


def test_bytes_follow_what_is_trained() -> None:
    with PipelineStrategy(stages=2, micro_batches=4, cut=[2, 2]) as strategy:
        expected = peaks(trained(strategy))
    with PipelineStrategy(stages=2, micro_batches=4, cut=[2, 2]) as strategy:
        model = trained(strategy, frozen=True)
        assert peaks(model)[0] < expected[0]
        for layer in model.layers:
            layer.trainable = True
        model.train_on_batch(X, Y)
        assert peaks(model) == expected


def test_a_strategy_does_not_keep_a_model() -> None:
    with PipelineStrategy(stages=2, micro_batches=2, cut=[2, 2]) as strategy:
        model = trained(strategy)
        layer = weakref.ref(model.layers[0])
        registry = CollectorRegistry()
        strategy.register_metrics(registry)
        assert strategy.timings().steps == registry.get_sample_value("shoal_pipeline_steps_total") == 1
        assert registry.get_sample_value("shoal_pipeline_stage_compute_seconds_total", {"stage": "1"})
        bubbles = [registry.get_sample_value("shoal_pipeline_stage_bubble_ratio", {"stage": it}) for it in "01"]
        assert bubbles == [it.bubble for it in strategy.timings().stages]
        assert registry.get_sample_value("shoal_pipeline_ideal_bubble_ratio") == 1 / 3
        del model
        gc.collect()
        assert layer() is None
        with pytest.raises(errors.BadRequest, match="no model of this strategy has taken a training step"):
            strategy.timings()
        assert registry.get_sample_value("shoal_pipeline_slowest_stage") == -1


def test_a_batch_may_be_given_as_lists() -> None:
    found = []
    for strategy in (PipelineStrategy(stages=2, micro_batches=2, cut=[1, 1]), MirroredStrategy(["/cpu:0", "/cpu:1"])):
        keras.utils.set_random_seed(1)
        with strategy, strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
            lists = model.train_on_batch(X.tolist(), Y.tolist(), [1.0] * 16)
            assert model.predict_on_batch(X.tolist()).shape == (16, 3)
            model.reset_metrics()
            found += [lists, model.test_on_batch(tuple(X.tolist()), Y.tolist())]
            with pytest.raises(errors.InvalidData, match="neither one of arrays nor one of numbers"):
                model.train_on_batch([[1.0], [1.0, 2.0]], Y[:2])
    np.testing.assert_allclose(found[:2], found[2:], rtol=1e-5)
