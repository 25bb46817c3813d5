"""Example of a training loop of your own under MirroredStrategy: trains a ResNet on CIFAR-10 on all GPUs.

    python custom_loop.py --depth 20 --epochs 30 --checkpoints FOLDER

`run` calls a step on each replica, and `reduce` adds up what the replicas return.
"""

import argparse
import os

from resnet import resnet

from shoal import data
from shoal_distribute import GradientTape, MirroredStrategy, function, keras, nn, train


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a ResNet on CIFAR-10 by a loop of your own, on all GPUs.")
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 layers (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="samples of each replica (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.001, help="learning rate (default: %(default)s)")
    parser.add_argument("--devices", nargs="+", help="such as /gpu:0 /gpu:1 (default: all GPUs)")
    parser.add_argument("--checkpoints", default="checkpoints", help="folder (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    keras.utils.set_random_seed(0)
    strategy = MirroredStrategy(args.devices)
    batch_size = args.batch_size * strategy.num_replicas_in_sync

    def distributed(images, labels, buffer):
        dataset = data.from_arrays(images, labels)
        return strategy.experimental_distribute_dataset(dataset.shuffle(buffer).batch(batch_size).prefetch(2))

    (x_train, y_train), (x_test, y_test) = keras.datasets.cifar10.load_data()
    train_dataset = distributed(x_train, y_train, len(x_train))
    test_dataset = distributed(x_test, y_test, 1)

    with strategy.scope():
        model = resnet(args.depth)
        optimizer = keras.optimizers.Adam(args.rate)
        optimizer.build(model.trainable_variables)
        loss_object = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        checkpoint = train.Checkpoint(model=model, optimizer=optimizer)

    def train_step(images, labels):
        with GradientTape() as tape:
            predictions = model(images, training=True)
            losses = loss_object(labels, predictions)
            loss = nn.compute_average_loss(losses, global_batch_size=batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(images, labels):
        predictions = model(images, training=False)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @function
    def run_on_replicas(step, images, labels):
        return strategy.run(step, args=(images, labels))

    for epoch in range(1, args.epochs + 1):
        total, batches = 0.0, 0
        for images, labels in train_dataset:
            losses = run_on_replicas(train_step, images, labels)
            total += float(strategy.reduce("SUM", losses, axis=None))
            batches += 1
        for images, labels in test_dataset:
            run_on_replicas(test_step, images, labels)
        if epoch % 2 == 0:
            checkpoint.save(os.path.join(args.checkpoints, "ckpt"))
        print(
            f"epoch {epoch}: loss {total / batches:.4f}, accuracy {float(train_accuracy.result()):.4f}, "
            f"test loss {float(test_loss.result()):.4f}, test accuracy {float(test_accuracy.result()):.4f}"
        )
        for metric in (train_accuracy, test_loss, test_accuracy):
            metric.reset_state()


if __name__ == "__main__":
    main()
