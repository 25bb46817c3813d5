"""Example of MirroredStrategy: trains a ResNet on CIFAR-10 by compile and fit, on all GPUs of this machine.

    python mirrored.py --depth 20 --epochs 30

Each GPU has a copy of the variables, and gets its part of each batch.
"""

import argparse

from resnet import resnet

from shoal_distribute import MirroredStrategy, keras


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet on CIFAR-10 on all GPUs of this machine.")
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 layers (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="samples of each replica (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.1, help="first learning rate of a replica")
    parser.add_argument("--devices", nargs="+", help="such as /gpu:0 /gpu:1 (default: all GPUs)")
    args = parser.parse_args()

    (x_train, y_train), (x_test, y_test) = keras.datasets.cifar10.load_data()
    keras.utils.set_random_seed(0)
    strategy = MirroredStrategy(args.devices)
    replicas = strategy.num_replicas_in_sync
    batch_size = args.batch_size * replicas
    print(f"{replicas} replicas, batches of {batch_size}")

    with strategy.scope():
        model = resnet(args.depth)
        steps = args.epochs * len(x_train) // batch_size
        rate = keras.optimizers.schedules.CosineDecay(args.rate * replicas, decay_steps=steps)
        model.compile(
            optimizer=keras.optimizers.SGD(rate, momentum=0.9),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(x_train, y_train, batch_size, args.epochs, verbose=2, validation_data=(x_test, y_test))
    loss, accuracy = model.evaluate(x_test, y_test, batch_size, verbose=0)
    print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
