"""Example of MultiWorkerMirroredStrategy: trains a ResNet on CIFAR-10 by compile and fit, in several processes.

Start it once for each worker, with the worker's own index:

    TF_CONFIG='{"cluster": {"worker": ["host-a:7090", "host-b:7090"]}, "task": {"type": "worker", "index": 0}}' \
        python multi_worker.py --backup FOLDER

If a worker dies, start all of them again: training continues after the last epoch that is complete. All workers need
to read the folder.
"""

import argparse

import tensorflow as tf
from resnet import resnet
from tensorflow import keras


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet on CIFAR-10 in several processes.")
    parser.add_argument("--depth", type=int, default=20, help="6n + 2 layers (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="samples of each replica (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.1, help="first learning rate of a replica")
    parser.add_argument("--backup", help="folder from which a run that has failed continues")
    args = parser.parse_args()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    (x_train, y_train), (x_test, y_test) = keras.datasets.cifar10.load_data()
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
    callbacks = [keras.callbacks.BackupAndRestore(args.backup)] if args.backup else []
    model.fit(x_train, y_train, batch_size, args.epochs, 2, callbacks, validation_data=(x_test, y_test))
    loss, accuracy = model.evaluate(x_test, y_test, batch_size, verbose=0)
    print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
