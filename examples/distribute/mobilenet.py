"""Example of fine-tuning under MirroredStrategy: adapts MobileNetV2 to CIFAR-10, from the weights of a file.

    python mobilenet.py --weights mobilenet_v2_weights_tf_dim_ordering_tf_kernels_1.0_224_no_top.h5

The file is one that Keras publishes for MobileNetV2 without its top. The first epochs train a new top, and the last
ones all layers. The model resizes the images, and scales them from -1 to 1.
"""

import argparse

from shoal_distribute import MirroredStrategy, keras


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune MobileNetV2 on CIFAR-10 on all GPUs of this machine.")
    parser.add_argument("--weights", required=True, help="file of weights without the top")
    parser.add_argument("--alpha", type=float, default=1.0, help="width of the model (default: %(default)s)")
    parser.add_argument("--size", type=int, default=224, help="height and width of images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, nargs=2, default=(5, 5), help="of the top, and of all (default: 5 5)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of each replica (default: %(default)s)")
    parser.add_argument("--devices", nargs="+", help="such as /gpu:0 /gpu:1 (default: all GPUs)")
    args = parser.parse_args()

    (x_train, y_train), (x_test, y_test) = keras.datasets.cifar10.load_data()
    keras.utils.set_random_seed(0)
    strategy = MirroredStrategy(args.devices)
    batch_size = args.batch_size * strategy.num_replicas_in_sync

    with strategy.scope():
        base = keras.applications.MobileNetV2(
            input_shape=(args.size, args.size, 3), alpha=args.alpha, include_top=False, weights=args.weights
        )
        base.trainable = False
        inputs = keras.Input((32, 32, 3))
        x = keras.layers.Resizing(args.size, args.size)(inputs)
        x = keras.layers.Rescaling(1 / 127.5, offset=-1)(x)
        x = base(x, training=False)  # batch normalization keeps its statistics, also when all layers are trained
        x = keras.layers.GlobalAveragePooling2D()(x)
        x = keras.layers.Dropout(0.2)(x)
        model = keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))
        model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x_train, y_train, batch_size, args.epochs[0], verbose=2, validation_data=(x_test, y_test))

    with strategy.scope():
        base.trainable = True
        model.compile(keras.optimizers.Adam(1e-5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x_train, y_train, batch_size, args.epochs[1], verbose=2, validation_data=(x_test, y_test))
    loss, accuracy = model.evaluate(x_test, y_test, batch_size, verbose=0)
    print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
