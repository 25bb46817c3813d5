"""Tensor parallelism: arrays and variables that are split over the devices of a mesh.

`device_mesh`, `split_bounds` and `vocabulary` are pure: which device is where in a mesh, which part of an axis each
device has, and the rows of one part of a table. `device_group` runs a thread for each device. `split_array` has one
array in parts, and `split_variable` a variable of which each device has a part. The layers over them are in
`keras.layers`.
"""

from shoal_distribute.tensor_parallel.device_group import DeviceGroup, group_of_devices
from shoal_distribute.tensor_parallel.device_mesh import DeviceMesh
from shoal_distribute.tensor_parallel.split_array import SplitArray, SplitPlace, total_on, views_of
from shoal_distribute.tensor_parallel.split_bounds import part_bounds
from shoal_distribute.tensor_parallel.split_variable import SplitVariable
from shoal_distribute.tensor_parallel.vocabulary import rows_of_part

__all__ = [
    "DeviceGroup",
    "DeviceMesh",
    "SplitArray",
    "SplitPlace",
    "SplitVariable",
    "group_of_devices",
    "part_bounds",
    "rows_of_part",
    "total_on",
    "views_of",
]
