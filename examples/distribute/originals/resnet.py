"""ResNets for images of 32 by 32 pixels (He et al., "Deep Residual Learning for Image Recognition", section 4.2).

The other examples of this folder train one.
"""

from tensorflow import keras


def resnet(depth: int, classes: int = 10) -> keras.Model:
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = convolution(x, 16)
    for filters, first_strides in ((16, 1), (32, 2), (64, 2)):
        for block in range((depth - 2) // 6):
            strides = 1 if block else first_strides
            shortcut = x if strides == 1 else convolution(x, filters, 1, strides, activation=None)
            x = convolution(x, filters, 3, strides)
            x = convolution(x, filters, activation=None)
            x = keras.layers.Add()([x, shortcut])
            x = keras.layers.Activation("relu")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = keras.layers.Dense(classes, activation="softmax")(x)
    return keras.Model(inputs, outputs)


def convolution(x, filters, kernel_size=3, strides=1, activation="relu"):
    x = keras.layers.Conv2D(
        filters, kernel_size, strides, padding="same", use_bias=False, kernel_initializer="he_normal"
    )(x)
    x = keras.layers.BatchNormalization()(x)
    return x if activation is None else keras.layers.Activation(activation)(x)
