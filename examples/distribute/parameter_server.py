"""Example of ParameterServerStrategy: trains a ResNet on CIFAR-10 by compile and fit, with variables on servers.

Start it once for each task, with the task's own type and index:

    TF_CONFIG='{"cluster": {"chief": ["a:7090"], "ps": ["b:7090", "c:7090"], "worker": ["d:7090", "e:7090", "f:7090"]},
        "task": {"type": "chief", "index": 0}}' python parameter_server.py
"""

import argparse

from resnet import resnet

from shoal import consistency, data
from shoal_distribute import ParameterServerStrategy, keras


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet on CIFAR-10 with variables on servers.")
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 layers (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps of an epoch (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="samples of a step (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (default: %(default)s)")
    parser.add_argument("--consistency", default="async", help="async, sync or ssp:BOUND (default: %(default)s)")
    args = parser.parse_args()

    strategy = ParameterServerStrategy(consistency=consistency.parse(args.consistency))
    keras.utils.set_random_seed(0)
    (x_train, y_train), (x_test, y_test) = keras.datasets.cifar10.load_data()

    def dataset_of(images, labels):
        dataset = data.from_arrays(images, labels)
        return dataset.shuffle(len(images)).repeat().batch(args.batch_size).prefetch(2)

    with strategy.scope():
        model = resnet(args.depth)
        model.compile(
            optimizer=keras.optimizers.SGD(args.rate),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(dataset_of(x_train, y_train), epochs=args.epochs, steps_per_epoch=args.steps, verbose=2)
    steps = len(x_test) // args.batch_size
    loss, accuracy = model.evaluate(dataset_of(x_test, y_test), steps=steps, verbose=0)
    print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
