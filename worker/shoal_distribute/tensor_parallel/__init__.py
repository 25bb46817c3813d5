"""Tensor parallelism: arrays and variables that are split over the devices or the ranks of a mesh.

`device_mesh`, `rank_mesh`, `split_bounds` and `vocabulary` are pure: which device or rank is where in a mesh, which
part of an axis each one has, and the rows of one part of a table. What computes the parts is a `PartGroup`:
`device_group` runs a thread for each device of this process, and `split_ranks` makes collective calls. `split_array`
has one array in parts, and `split_variable` a variable of which each device has a part. The layers over them are in
`keras.layers`.
"""

from shoal_distribute.tensor_parallel.device_group import DeviceGroup, group_of_devices
from shoal_distribute.tensor_parallel.device_mesh import DeviceMesh
from shoal_distribute.tensor_parallel.part_group import PartGroup
from shoal_distribute.tensor_parallel.rank_mesh import RankMesh
from shoal_distribute.tensor_parallel.split_array import SplitArray, SplitPlace, views_of
from shoal_distribute.tensor_parallel.split_bounds import part_bounds
from shoal_distribute.tensor_parallel.split_ranks import SplitRanks
from shoal_distribute.tensor_parallel.split_variable import SplitVariable
from shoal_distribute.tensor_parallel.vocabulary import rows_of_part

__all__ = [
    "DeviceGroup",
    "DeviceMesh",
    "PartGroup",
    "RankMesh",
    "SplitArray",
    "SplitPlace",
    "SplitRanks",
    "SplitVariable",
    "group_of_devices",
    "part_bounds",
    "rows_of_part",
    "views_of",
]
